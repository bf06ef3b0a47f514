"""Exchanges of sums within random trainings, and failures in their steps: one device gives the same results.

Order, owner and channel of the sums are drawn, and micro-batches, a placed model, ragged batches, contexts without
samples, a replica alone, and a fault. After a failure nothing has changed, and the step can be repeated.
"""
import os

import cuda_on_cpu
import pytest
import theano
from hypothesis import given
from support import exchange_combinations
from support.exchange_cells import in_the_order_of_the_tree, load, on_one_device, table
from support.exchange_combinations import N_CONTEXTS, cases, check, made
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.standin import run
from support.strategies import examples

ON_STANDIN = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]
FAULTS = {'op', 'interrupt', 'memory'}


@pytest.mark.parametrize('n', [40, pytest.param(600, marks=pytest.mark.slow)])
def test_contexts_of_the_cpu(n, contexts):
    contexts('cpu', N_CONTEXTS)
    exchange_combinations.met.clear()
    try:
        examples(n)(given(cases())(check))()
    finally:
        made.cache_clear()
    assert FAULTS < set(exchange_combinations.met)


ON_DEVICES = '''
from hypothesis import given
from support.exchange_combinations import cases, check, met
from support.strategies import examples
mgpu.init(4)
examples(%d)(given(cases(on_devices=True))(check))()
print(*sorted(met))
'''


@pytest.mark.parametrize('n', [10, pytest.param(200, marks=pytest.mark.slow)])
class TestCudaDevices:
    pytestmark = ON_STANDIN

    @pytest.mark.slow
    def test_host_and_nccl(self, n):
        """Each array is an allocation of its own, and one of them fails."""
        *_, met = run(ON_DEVICES % n, N_CONTEXTS, 'gpuarray.preallocate=-1', delay_us=50)
        assert set(met.split()) >= (FAULTS if n > 100 else {'memory'})


@pytest.mark.slow
@pytest.mark.mpi
class TestRanks:
    @pytest.mark.parametrize('ranks, n', [(2, 1), (2, 2), (3, 1)])
    def test_a_rank_that_fails_is_an_error_of_all_and_changes_nothing(self, ranks, n, tmp_path):
        """The steps are repeated, so the training ends as if nothing had failed."""
        from test_table import check
        launch(ranks, 'failing_ranks', tmp_path / 'found.npz', n, flags=INTERPRETED)
        cells = [cell for cell in table(['host'], [n]) if cell.channel != 'none']
        with theano.configparser.change_flags(floatX='float32'):
            check(cells, load(tmp_path / 'found.npz'), (on_one_device(PYTHON), in_the_order_of_the_tree()))

    @pytest.mark.parametrize('owner', ['all', 'one'])
    @pytest.mark.parametrize('order', ['any', 'tree'])
    def test_a_rank_that_is_killed_ends_the_job(self, order, owner, tmp_path):
        done = launch(2, 'killed', tmp_path / 'job', order, owner, flags=INTERPRETED, expected=None)
        assert done.returncode and os.listdir(str(tmp_path)) == ['job.struck'], done.stderr


LOST = '''
import ctypes
from support.exchange_cells import Cell, Net, batch
from theano_mgpu.exchange.memory import Memories
Memories.block = %d
from support.nccl_programs import fails
cell, net = Cell(%r, %r, %r, 2), Net()
mgpu.init(2)
with cell.flags():
    step = mgpu.training_function(net.inputs, net.loss, net.params, net.updates, **cell.options())
for size in (9, 8):
    step(*batch(size, size))
before = [value.get_value() for value in net.params]
ctypes.CDLL('libcuda.so').cudaOnCpuFailAfter(1, ctypes.c_long(%d), 719)
print(fails(lambda: step(*batch(9, 9)))[0])
print(all((value.get_value() == old).all() for value, old in zip(net.params, before)))
'''


@pytest.mark.slow
@pytest.mark.parametrize('kernels, block', [(0, 1 << 22), (20, 1 << 22), (20, 1000)])
@pytest.mark.parametrize('channel', ['host', 'nccl'])
@pytest.mark.parametrize('order, owner', [('any', 'all'), ('any', 'one'), ('tree', 'all'), ('tree', 'one')])
class TestLostDevices:
    pytestmark = ON_STANDIN

    def test_a_device_that_is_lost_is_named(self, order, owner, channel, kernels, block):
        error, same = run(LOST % (block, order, owner, channel, kernels))
        assert error.startswith('ReplicaError: replica 1 (context dev1->cuda1'), error
        assert same == 'True'
