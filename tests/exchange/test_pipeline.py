"""The host's channel is a pipeline: blocks come from the devices, are added, go over the ranks and back at one time."""
import cuda_on_cpu
import pytest
from support.standin import launched, run

pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

# Each block but the first arrives only once the one before has gone over the ranks, and back to the devices.
STEP = '''
import threading
import theano
import theano.tensor as T
from theano_mgpu.exchange import host, memory, orders
memory.Memories.block = 1000
gone, there = [[threading.Event() for _ in range(100)] for _ in range(2)]
n_ways, waited = min(2, mgpu.size()), []
arrive, write, add_over = memory.Fetcher.arrive, host.Sent.write, orders.AnyOrder.add_over

def late(fetcher, number):
    if number:
        waited.extend(each[number - 1].wait(20) for each in (gone, there)[-n_ways:])
    arrive(fetcher, number)

def noted(sent, block, flat):
    write(sent, block, flat)
    there[blocks.index(block)].set()

def counted(order, *given):
    gone[sum(each.is_set() for each in gone)].set()
    add_over(order, *given)

x = T.matrix('x')
w = theano.shared(np.arange(3000, dtype=theano.config.floatX).reshape(30, 100))
step = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w], lambda gradients: [(w, w - gradients[0] / 100)])
batch = np.random.RandomState(0).rand(8, 30).astype(w.dtype)
step(batch)
(_, channel), = step.executable.exchanges.values()
blocks, value = channel._blocks, w.get_value()
memory.Fetcher.arrive, host.Sent.write, orders.AnyOrder.add_over = late, noted, counted
step(batch)
expected = value - 2 * batch.T.dot(batch.dot(value)) / (8 * 100) / 100
print(len(blocks) > 9, len(waited) > 9, all(waited), abs(w.get_value() - expected).max() < 1e-5 * abs(expected).max())
'''


def test_a_block_goes_back_while_others_come():
    assert run(STEP, 2, 'mgpu.collectives=host,contexts=dev0->cuda0;dev1->cuda1') == ['True True True True']


@pytest.mark.slow
@pytest.mark.mpi
def test_a_block_goes_over_the_ranks_and_back_while_others_come(tmp_path):
    assert launched(2, STEP, tmp_path, 4, 'mgpu.collectives=host') == ['True True True True']
