"""A maximum or minimum over the parts of a batch has NaN where plain Theano's has it, whatever reduces the parts."""
import ast

import cuda_on_cpu
import pytest
from support import extremes
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.standin import run
from theano.configparser import change_flags


@pytest.mark.parametrize('flags, options', [
    ({}, {}), ({}, {'micro_batches': 3}), ({'mgpu.logical_shards': 5}, {}), ({'mgpu.shares': '3:1'}, {})], ids=str)
def test_contexts_on_the_host(cpu2, flags, options):
    with change_flags(**flags):
        extremes.check(PYTHON, **options)


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes():
    launch(2, flags=INTERPRETED, job=extremes.__file__)


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes_with_logical_shards():
    launch(2, flags=INTERPRETED + ',mgpu.logical_shards=6', job=extremes.__file__)


@pytest.mark.slow
@pytest.mark.opencl
def test_opencl_devices(gpu2):
    extremes.check()


PROGRAM = '''
from support.extremes import check
from theano_mgpu.plan.explain import explanation
mgpu.init('dev0->cuda0;dev1->cuda1')
data = explanation(check().plan)
print(sorted({(word, each['where']) for each in data['instructions'] for word in ('sum', 'maximum', 'minimum')
              if each['instruction'] in ('add', 'gather') and word in each['what']}))
'''


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
@pytest.mark.parametrize('flags', ['', 'mgpu.logical_shards=6'])
def test_devices_that_nccl_connects(flags):
    """Sums that a stage had computed, and that a later one than the next reads, were lost: "nothing has computed"."""
    ways = dict(ast.literal_eval(run(PROGRAM, flags=flags)[-1]))
    assert ways['maximum'] == ways['minimum'] == 'the host'
    assert ways['sum'].startswith('NCCL')
