"""The duties of any channel of sums, on each channel: of the host, of NCCL, and of a replica alone."""
import cuda_on_cpu
import pytest
from support.channel_cases import CASES, Make, by_host, stays
from support.standin import launched, run

ON_STANDIN = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]
HALF = 'float16', 'float32', 'float64'


@pytest.mark.slow_with('nothing_holds_the_parts_of_a_step, any-2*', 'nothing_holds_the_parts_of_a_failed_step, tree-1*',
                       'nothing_holds_the_parts_of_a_step, tree-3*', 'nothing_holds_the_parts_of_a_step, any-3*',
                       'nothing_holds_the_parts_of_a_failed_step, tree-3*',
                       'nothing_holds_the_parts_of_a_step, tree-2*', 'nothing_holds_the_parts_of_a_failed_step, any-2*',
                       'nothing_holds_the_parts_of_a_failed_step, tree-2*',
                       'nothing_holds_the_parts_of_a_failed_step, any-3*', 'nothing_holds_the_parts_of_a_step, any-1*',
                       'nothing_holds_the_parts_of_a_failed_step, any-1*', 'nothing_holds_the_parts_of_a_step, tree-1*')
@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('name', CASES)
def test_the_host_adds_for_contexts_of_the_cpu(name, n, contexts):
    made = contexts('cpu', n)
    CASES[name](Make(by_host, made, dtypes=HALF), made)


@pytest.mark.cuda
@pytest.mark.parametrize('name', CASES)
def test_the_host_adds_for_devices(name, gpu2):
    CASES[name](Make(by_host, gpu2, dtypes=HALF), gpu2)


@pytest.mark.cuda
@pytest.mark.parametrize('name', CASES)
def test_the_sums_of_a_replica_alone_stay_on_its_device(name, gpu2):
    CASES[name](Make(stays, gpu2[:1], dtypes=HALF), gpu2[:1])


@pytest.mark.parametrize('name', [name for name in CASES if name.endswith('any')])
def test_the_sums_of_a_replica_alone_stay_on_the_host(name, cpu2):
    """A replica alone with the order of the tree has a HostChannel: it adds large products of the shards."""
    CASES[name](Make(stays, cpu2[:1], dtypes=HALF), cpu2[:1])


ON_DEVICES = '''
from support.channel_cases import CHANNELS, Make, failures
contexts = mgpu.init(3)
failed = ['%s, %d devices: %s' % (name, n, each) for n, name in ((2, 'nccl'), (3, 'nccl'), (2, 'host'))
          for each in failures(Make(CHANNELS[name], contexts[:n]), contexts[:n])]
print('\\n'.join(failed or ['all cases']))
'''


class TestCudaDevices:
    pytestmark = ON_STANDIN

    @pytest.mark.slow
    @pytest.mark.parametrize('block', [1 << 22, 4000])
    def test_nccl_and_the_host_add_for_devices(self, block):
        """Operations that nothing orders are delayed at random; each array is an allocation."""
        code = 'from theano_mgpu.exchange import memory\nmemory.Memories.block = %d\n' % block + ON_DEVICES
        *failed, last = run(code, 3, 'gpuarray.preallocate=-1', delay_us=50)
        assert last == 'all cases', '\n'.join([*failed, last])


OVER_RANKS = """
from support.channel_cases import CASES, CHANNELS, Make
from theano_mgpu.comm.mpi import mpi_communicator
contexts, ranks = mgpu.init(), mpi_communicator()
for channel in %r:
    for name, run in CASES.items():
        try:
            run(Make(CHANNELS[channel], contexts, ranks), contexts)
        except Exception as error:
            raise AssertionError('rank %%d, %%s, %%s' %% (ranks.rank, channel, name)) from error
print('all cases')
"""


@pytest.mark.slow
@pytest.mark.mpi
class TestRanksWithDevices:
    """A case that fails on one rank ends the job."""

    pytestmark = ON_STANDIN

    @pytest.mark.parametrize('n', [1, 2])
    def test_two_ranks(self, n, tmp_path):
        assert launched(2, OVER_RANKS % (['host', 'nccl'],), tmp_path, 2 * n, delay_us=50)[-1] == 'all cases'
