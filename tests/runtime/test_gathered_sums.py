"""Sums of logical shards that devices add in the order of the tree: the bits of one device, and errors of NCCL."""
import collections

from theano_mgpu.comm.tree import Node, Tree, folded
from theano_mgpu.devices.exchange_operations import EVERY
from theano_mgpu.exchange import tree_devices
from theano_mgpu.exchange.layout import ALIGNED, SMALL
from theano_mgpu.exchange.nccl_channel import NcclLayout
from theano_mgpu.exchange.tree_devices import order_of, pieces

import cuda_on_cpu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.standin import launched, run
from support.strategies import examples

ON_STANDIN = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]


@examples(200)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple))
def test_nodes_are_added_in_the_order_of_the_tree(counts):
    tree = Tree(0, counts)
    values = np.random.RandomState(sum(counts)).randn(tree.total, 50).astype('float32')
    nodes = []
    for device, count in enumerate(counts):
        shards = range(tree.first(device), tree.first(device) + count)
        nodes += [(device, node.value) for node in tree.merged(
            [Node(0, shard, values[shard]) for shard in shards], lambda chain, *_: folded(chain, np.add))]
    devices, order = order_of(counts)
    assert devices == tuple(device for device, _ in nodes)
    total = eval(order, {'n%d' % i: value for i, (_, value) in enumerate(nodes)})
    np.testing.assert_array_equal(total, tree.reduced(values, np.add))


@pytest.mark.slow
@examples(100)
@given(st.lists(st.tuples(st.integers(0, 40000), st.sampled_from(['float32', 'float64']), st.integers(-1, 4)),
                min_size=1, max_size=6), st.integers(2, 5), st.sampled_from([1024, 4096, 100000]))
def test_the_blocks_of_the_devices_have_each_element_once(arrays, n, limit):
    layout = NcclLayout([((size,), np.dtype(dtype)) for size, dtype, _ in arrays],
                    [owner if 0 <= owner < n else None for *_, owner in arrays])
    before, tree_devices.PIECE = tree_devices.PIECE, limit
    try:
        found = list(pieces(layout, n))
    finally:
        tree_devices.PIECE = before
    ranges, shared = [], collections.Counter()
    for piece in found:
        of_owners = collections.defaultdict(collections.Counter)
        for each in piece:
            taken = of_owners[each.owner]
            assert each.dtype == layout.dtypes[each.number] and each.place >= taken[each.dtype]
            assert each.place % ALIGNED == each.start % ALIGNED == 0
            taken[each.dtype] = each.place + each.stop - each.start
            ranges.append((each.number, each.start, each.stop))
            if layout.roots[each.number] == EVERY:
                shared[each.owner] += each.bytes
            else:
                assert each.owner == layout.roots[each.number]
        for owner, taken in of_owners.items():
            size = sum(n * np.dtype(dtype).itemsize for dtype, n in taken.items())
            assert 0 < size <= (limit if owner == EVERY else limit // n)
        assert len(of_owners) == 1 or EVERY not in of_owners  # they would use the same memory
    ends = dict.fromkeys(range(len(layout.lengths)), 0)
    for number, start, stop in sorted(ranges):
        assert start == ends[number] < stop
        ends[number] = stop
    assert list(ends.values()) == layout.lengths.tolist()
    # Few bytes go to every device; more are divided equally, but for the ends of arrays.
    assert set(shared) == {EVERY} or not shared or sum(shared.values()) > SMALL - 256 * len(arrays)
    assert max(shared.values(), default=0) <= sum(shared.values()) / n + 256 * len(arrays) or set(shared) == {EVERY}


COMMON = '''
import ctypes, hashlib, time
import theano, theano.tensor as T
sys.path.append(sys.path[0] + '/runtime')
from models import adam, sgd
from support.nccl_programs import by, fails
from test_logical_shards import Net
from theano_mgpu.devices import nccl as module
from theano_mgpu.devices.exchange_operations import BROADCAST, MESSAGE
from theano_mgpu.exchange import tree_devices
nccl, cuda = ctypes.CDLL('libnccl.so.2'), ctypes.CDLL('libcuda.so')
floatX, roots, senders, exchange = theano.config.floatX, [], [], module.NcclCommunicator.exchange

def counted(self, copies, collectives):
    roots.append(set(collectives.roots.tolist()))
    senders.append(set(collectives.roots[collectives.ops == MESSAGE].tolist()))
    assert set(collectives.ops.tolist()) <= {BROADCAST, MESSAGE}
    exchange(self, copies, collectives)
# The trial adds in any order.
module.NcclCommunicator.exchange, module.Trial.failure, module.Trial.rate = counted, lambda *_: '', lambda *_: 1e9
tree_devices.PIECE = 8192  # of 48 kB of gradients of a layer

def digest(values):
    return hashlib.md5(b''.join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()

def dense(n, collectives='auto', updates=sgd, **options):
    """Return a training step on n devices, or for 0 on the devices of the flag `contexts`, and the parameters."""
    if n:
        mgpu.init(n)
    rng, h, t = np.random.RandomState(0), T.matrix('x'), T.ivector('t')
    x, params = h, []
    for before, after in ((6, 120), (120, 100), (100, 4)):
        params += [theano.shared((rng.randn(before, after) / before ** .5).astype(floatX)),
                   theano.shared(np.zeros(after, floatX))]
        h = T.tanh(T.dot(h, params[-2]) + params[-1])
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(h), t).mean()
    with theano.configparser.change_flags(**{'mgpu.collectives': collectives}):
        return mgpu.training_function([x, t], loss, params, updates, **options), params

def batch(size):
    rng = np.random.RandomState(size)
    return rng.randn(size, 6).astype(floatX), rng.randint(0, 4, size).astype('int32')

def received(n):
    """Return the bytes that each of n devices has received from others so far."""
    numbers = [ctypes.c_size_t() for _ in range(n)]
    for i, number in enumerate(numbers):
        assert nccl.ncclOnCpuReceived(i, ctypes.byref(number)) == 0
    return np.array([number.value for number in numbers])

def trained(*arguments, sizes=(9, 2, 1), **options):
    """Return the digest of the losses and parameters of some steps."""
    step, params = dense(*arguments, **options)
    losses = [step(*batch(size)) for size in sizes]
    return digest(losses + [param.get_value() for param in params])
'''


class TestTheBitsOfOneDevice:
    pytestmark = ON_STANDIN

    @pytest.mark.slow
    def test_three_devices(self):
        """One device has two of the four shards; a batch of one sample leaves two devices without any."""
        one, three, by_nccl = run(COMMON + '''
print(trained(1))
print(trained(3))
print(senders[0] == {0, 1, 2}, senders[-2:] == [{0}, set()], len(senders))
''', 3, 'mgpu.logical_shards=4', delay_us=200)
        assert three == one
        # 51.5 kB of sums are 7 pieces, in each of 3 steps; the sums of the last piece need a group of their own.
        assert by_nccl == 'True True 24'

    @pytest.mark.slow
    @pytest.mark.parametrize('floatx, options, flags', [
        ('float32', "updates=adam", ''), ('float64', "updates=adam, executor='threads'", ''),
        ('float32', "updates=adam, update_on='sharded'", ''), ('float32', "updates=adam, update_on='host'", ''),
        ('float32', "updates=adam", ',mgpu.shares=1:3:2')])
    def test_ways_to_train(self, floatx, options, flags):
        """A sharded update has sums that one device alone gets."""
        one, *others, count = run(COMMON + '''
with theano.configparser.change_flags(**{'mgpu.shares': 'equal'}):
    print(trained(1, OPTIONS, sizes=SIZES))
print(trained(3, OPTIONS, sizes=SIZES))
print(trained(3, 'host', OPTIONS, sizes=SIZES))
print(len(roots) > 20)
'''.replace('OPTIONS', options).replace('SIZES', '(13, 8, 9, 2, 1, 5)'), 3,
                                'floatX=%s,mgpu.logical_shards=8%s' % (floatx, flags), delay_us=200)
        assert others == [one] * 2 and count == 'True'

    @pytest.mark.slow
    @pytest.mark.parametrize('n, options', [(4, ''), (2, ''), (4, "update_on='sharded'")])
    def test_bytes_that_each_device_receives(self, n, options):
        """Each device received the sums of all others: n - 1 times the bytes of all parameters.

        A sharded update has each device receive the parts of the sums that it owns, and then all new parameters.
        """
        of_devices, = run(COMMON + """
step, params = dense(N, OPTIONS)
step(*batch(16))
before = received(N)
step(*batch(16))
print(list((received(N) - before) / sum(param.get_value().nbytes for param in params)))
""".replace('OPTIONS', options).replace('N', str(n)), n, 'mgpu.logical_shards=8')
        found, expected = np.array(eval(of_devices)), 2 * (n - 1) / n
        if options:  # one device receives the whole of a large sum; small ones are few bytes, and all devices add them
            assert expected * .8 < found.mean() < expected * 1.2
        else:
            assert (abs(found / expected - 1) < .02).all(), found

    @pytest.mark.slow
    @pytest.mark.parametrize('number, devices', [(4, (2, 4)), (8, (3,)), (5, (2,))])
    def test_batch_normalisation_dropout_and_adam(self, number, devices):
        """Some sums are needed in the middle of a step. Others than sums go through the host."""
        code = COMMON + '''
for n, how in [(1, 'auto')] + [(n, how) for n in DEVICES for how in ('host', 'nccl')]:
    with theano.configparser.change_flags(**{'mgpu.collectives': how}):
        mgpu.init(n)
        net = Net('FAST_RUN')
        print(digest(net.everything((8, 5, 1, 13, 3))), len(roots) > 20, 'NCCL by blocks' in str(net.step.plan))
'''
        one, *others = run(code.replace('DEVICES', repr(devices)), max(devices), 'mgpu.logical_shards=%d' % number,
                           delay_us=300, nccl_delay_us=200)
        of_one = one.split()[0]
        assert others[:2] == [of_one + ' False False', of_one + ' True True']
        assert {line.split()[0] for line in others} == {of_one}

    @pytest.mark.slow
    @pytest.mark.mpi
    @pytest.mark.parametrize('options', ['', "update_on='sharded'"])
    def test_two_processes_with_two_devices_each(self, options, tmp_path):
        """Batches of one and two samples leave a process without samples; it takes part in all exchanges."""
        sizes = '(13, 8, 1, 9, 2, 5)'
        one, = run(COMMON + 'print(trained(1, updates=adam, sizes=%s))' % sizes, 1, 'mgpu.logical_shards=8')
        code = COMMON + '''
print(trained(0, 'nccl', updates=adam, sizes=%s, %s), len(roots) > 20, {0, 1, 2, 3} in roots)
print(trained(0, 'host', updates=adam, sizes=%s, %s))
''' % ((sizes, options) * 2)
        of_ranks = launched(2, code, tmp_path, 4, 'mgpu.logical_shards=8')
        assert of_ranks == [one + ' True True', one]

    @pytest.mark.slow
    def test_gradients_are_not_copied_to_the_host(self, tmp_path):
        start, stop = map(float, run(COMMON + '''
step, params = dense(2)
step(*batch(9))
start = time.clock_gettime(time.CLOCK_MONOTONIC)
for size in (9, 8, 7):
    step(*batch(size))
print(start, time.clock_gettime(time.CLOCK_MONOTONIC))
''', 2, 'mgpu.logical_shards=4,mgpu.cuda_graphs=off', trace=tmp_path / 'trace')[0].split())
        copies = [line.split() for line in (tmp_path / 'trace').read_text().splitlines()]
        copies = [line for line in copies if line[2] == 'DtoH' and start < float(line[0]) < stop]
        assert 0 < len(copies) <= 3 and all(int(line[-1]) < 100 for line in copies), copies  # the loss of each step


class TestErrorsOfNccl:
    pytestmark = ON_STANDIN

    @pytest.mark.slow
    @pytest.mark.parametrize('groups', [0, 3])
    def test_the_host_adds_once_nccl_has_failed(self, groups):
        """It may fail between two pieces."""
        equal, error = run(COMMON + '''
step, params = dense(2)
for size in (9, 2):
    step(*batch(size))
nccl.ncclOnCpuFailAfter(ctypes.c_long(GROUPS), 2)
found = fails(lambda: step(*batch(8)))
other, others = dense(1)
for size in (9, 2, 8):
    other(*batch(size))
print(digest([each.get_value() for each in params]) == digest([each.get_value() for each in others]))
print(found)
'''.replace('GROUPS', str(groups)), 2, 'mgpu.logical_shards=4')
        assert (equal, error) == ('True', "('', [])")

    @pytest.mark.slow
    def test_a_device_that_is_lost_is_named(self):
        error, same = run(COMMON + '''
step, params = dense(2)
for size in (9, 2):
    step(*batch(size))
before = digest([each.get_value() for each in params])
def lost(self, copies, collectives):
    exchange(self, copies, collectives)
    cuda.cudaOnCpuFailAfter(1, ctypes.c_long(0), 719)
module.NcclCommunicator.exchange = lost
print(fails(lambda: step(*batch(8)))[0])
print(before == digest([each.get_value() for each in params]))
''', 2, 'mgpu.logical_shards=4')
        assert error.startswith('ReplicaError: replica 1 (context dev1->cuda1'), error
        assert same == 'True'

    @pytest.mark.slow
    @pytest.mark.parametrize('function, addresses', [('ncclBroadcast', 2), ('ncclSend', 1)])
    def test_a_device_that_does_not_come_is_not_waited_for_beyond_the_timeout(self, function, addresses):
        """Its part of each exchange is left out."""
        assert run(COMMON + '''
step, params = dense(2)
for size in (9, 2):
    step(*batch(size))
began, calls = time.time(), []
pointer, number = ctypes.c_void_p, ctypes.c_int
types = [pointer] * ADDRESSES + [ctypes.c_size_t, number, number, pointer, pointer]
original = getattr(nccl, FUNCTION)
original.argtypes = types
def others(*args):
    calls.append(args[-2])
    return 0 if args[-2] == calls[0] else original(*args)
call = ctypes.CFUNCTYPE(ctypes.c_int, *types)(others)
def without_one(self, copies, collectives):
    addresses = [self._nccl.address(name) for name in module.FUNCTIONS]
    addresses[module.FUNCTIONS.index(FUNCTION)] = ctypes.cast(call, ctypes.c_void_p).value
    self._library.mgpu_use(module.pointers(addresses))
    exchange(self, copies, collectives)
module.NcclCommunicator.exchange = without_one
print(fails(lambda: step(*batch(8))))
print(time.time() - began < 20)
other, others = dense(1)
for size in (9, 2, 8):
    other(*batch(size))
print(digest([each.get_value() for each in params]) == digest([each.get_value() for each in others]))
'''.replace('FUNCTION)', repr(function) + ')').replace('ADDRESSES', str(addresses)), 2,
                   'mgpu.logical_shards=4,mgpu.timeout=2') == ["('', [])", 'True', 'True']
