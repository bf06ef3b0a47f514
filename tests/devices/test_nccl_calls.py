"""Sums between CUDA devices by NCCL: the answers of one device, and errors; each in a process on the stand-in."""
import os
import re
import subprocess

from theano_mgpu.devices.nccl_library import Nccl
from theano_mgpu.errors import ExchangeError

import cuda_on_cpu
import pytest
from support.standin import launched, run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                 reason=cuda_on_cpu.unavailable() or '')]

TRAINING = '''
import ctypes, os, time
import theano, theano.tensor as T
from support.nccl_programs import by, fails
nccl = ctypes.CDLL('libnccl.so.2')
cuda = ctypes.CDLL('libcuda.so')
floatX = theano.config.floatX

def normalised(x, n):
    """A dense layer with batch normalisation: its statistics are sums in the middle of a step."""
    return T.nnet.bn.batch_normalization_train(x, theano.shared(np.ones(n, floatX)), theano.shared(np.zeros(n, floatX)),
                                               axes=(0,))[0]

def trained(collectives, n, sizes=(6, 20, 30, 4), normalise=True, **options):
    """Return a training step on n devices, and the parameters."""
    rng, x, t = np.random.RandomState(0), T.matrix('x'), T.ivector('t')
    contexts = mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(n)))
    params, h = [], x
    for before, after in zip(sizes, sizes[1:]):
        params += [theano.shared((rng.randn(before, after) / before ** .5).astype(floatX)),
                   theano.shared(np.zeros(after, floatX))]
        h = T.dot(h, params[-2]) + params[-1]
        if after != sizes[-1]:
            h = T.tanh(normalised(h, after) if normalise else h)
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(h), t).mean()
    with theano.configparser.change_flags(**{'mgpu.collectives': collectives}):
        step = mgpu.training_function([x, t], loss, params, lambda gradients, params: [
            (param, param - T.cast(.1, floatX) * gradient) for param, gradient in zip(params, gradients)], **options)
    return step, params

def batches(n, sizes=(8, 13, 16, 9, 3)):
    rng = np.random.RandomState(1)
    for i in range(n):
        size = sizes[i % len(sizes)]
        yield rng.randn(size, 6).astype(floatX), rng.randint(0, 4, size).astype('int32')

def values(params):
    return [param.get_value() for param in params]
'''

EQUAL = TRAINING + '''
n, steps, options = N, STEPS, OPTIONS
results = []
for collectives, n_devices in (('nccl', n), ('host', n), ('auto', 1)):
    step, params = trained(collectives, n_devices, **options)
    losses = [step(*batch) for batch in batches(steps)]
    results.append(losses + values(params))
    if collectives != 'auto':
        print(by(step))
for other in results[1:]:
    for a, b in zip(results[0], other):
        np.testing.assert_allclose(a, b, rtol=1e-3 if floatX == 'float32' else 1e-9, atol=TOLERANCE)
'''


@pytest.mark.slow  # the tests marked `cuda` compare answers by NCCL with plain Theano's in `make test`
@pytest.mark.parametrize('n,steps,floatx,options,settings', [
    (2, 5, 'float32', {}, {'delay_us': 200}),
    (2, 50, 'float32', {}, {'delay_us': 500, 'nccl_delay_us': 300}),
    (4, 50, 'float32', {}, {'delay_us': 500}),
    (4, 50, 'float64', {'executor': 'threads'}, {'delay_us': 500}),
    (2, 50, 'float64', {'micro_batches': 2, 'normalise': False}, {'delay_us': 500}),
    (2, 50, 'float32', {'update_on': 'sharded'}, {}),
    (2, 50, 'float32', {'update_on': 'host'}, {}),
])
def test_the_answers_are_those_of_one_device(n, steps, floatx, options, settings):
    """Batches are ragged, and some replicas have no sample of one."""
    code = EQUAL.replace('N,', '%d,' % n, 1).replace('STEPS', str(steps)).replace('OPTIONS', repr(options))
    code = code.replace('TOLERANCE', '2e-4' if floatx == 'float32' else '1e-9')
    assert run(code, n, 'floatX=' + floatx, **settings) == ['NCCL', 'the host']


SHARDED = TRAINING + """
# Gradients of 48 and 36 kB, each of which one device alone gets.
def sharded(collectives, n):
    return trained(collectives, n, sizes=(6, 120, 100, 90, 4), normalise=False, update_on='sharded')

from theano_mgpu.runtime.sharded_update import DeviceBroadcasts
from theano_mgpu.devices.exchange_operations import Collectives
starts, roots = [], []
start, new = DeviceBroadcasts.start, Collectives.__new__
DeviceBroadcasts.start = lambda self, values: starts.append(1) or start(self, values)
Collectives.__new__ = lambda cls, *fields: roots.append(sorted(set(fields[5].tolist()))) or new(cls, *fields)
"""

SHARDED_EQUAL = SHARDED + """
results = []
for collectives in ('nccl', 'host'):
    step, params = sharded(collectives, N)
    losses = [step(*batch) for batch in batches(12)]
    results.append(losses + values(params))
    print(by(step), len(starts))
print(max(abs(np.asarray(a) - b).max() for a, b in zip(*results)) < 1e-5)
print(roots[-2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize('n', [2, 4])
def test_a_divided_update_sends_sums_to_their_readers_and_new_values_to_all(n):
    nccl, host, same, roots = run(SHARDED_EQUAL.replace('N)', '%d)' % n), n, delay_us=200)
    assert (nccl, host, same) == ('NCCL 12', 'the host 12', 'True')
    assert set(sum(eval(roots), [])) == {-1, *range(n)}


@pytest.mark.slow
@pytest.mark.mpi
def test_a_divided_update_over_two_processes_with_two_devices_each(tmp_path):
    assert launched(2, SHARDED_EQUAL.replace('N)', '4)'), tmp_path, 4)[:3] == ['NCCL 12', 'the host 12', 'True']


INIT = "mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(n)))"
FAILING = SHARDED.replace(INIT, 'mgpu.init(CONTEXTS)') + """
from theano_mgpu.utils import rank_process
told = []
rank_process.say = told.append
make = sharded if SHARDED else trained
def fail_here(kind):
    if mgpu.rank() == RANK:
        nccl.ncclOnCpuFailAfter(ctypes.c_long(0), kind)
if AFTER is None:
    fail_here(KIND)
step, params = make('auto', 2)
losses = []
for number, batch in enumerate(batches(STEPS)):
    if number == AFTER:
        fail_here(KIND)
    losses.append(step(*batch))
other, _ = make('auto', 2)  # it knows already
reference, others = make('host', 2)
expected = [reference(*batch) for batch in batches(STEPS)]
notes = [line for line in told if 'NCCL' in line and 'NCCL connects' not in line]  # as it does for a while
print(np.allclose(losses, expected, 1e-4), max(abs(a - b).max() for a, b in zip(values(params), values(others))) < 1e-5)
print(by(step), '|', by(other), '|', len(notes))
print(*notes)
print([choice.reason for choice in step.plan.choices if choice.what == 'collectives'])
print(fails(lambda: make('nccl', 2)))
"""
CODE, WRONG = 'NCCL gives error 2, unhandled system error', 'has got other numbers than were sent'
FAILURES = pytest.mark.parametrize('after,kind,sharded', [
    (None, 100, False), (0, 2, False), (3, 2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (None, 2, True), (0, 2, True), (49, 2, False), (49, 2, True)))])


def failing(after, kind, sharded, contexts, rank):
    code = FAILING.replace('if SHARDED', 'if %s' % sharded).replace('AFTER', str(after)).replace('KIND', str(kind))
    return code.replace('CONTEXTS', contexts).replace('RANK', str(rank)).replace('STEPS', str((after or 0) + 3))


def check_of_failure(lines, kind):
    same, by_host, note, reasons, refused = lines
    assert (same, by_host) == ('True True', 'the host | the host | 1')
    text = WRONG if kind == 100 else CODE
    assert text in note and 'From now on, sums go through the host' in note
    earlier = 'an exchange by NCCL has failed in this process'
    assert (earlier in reasons or text in reasons) and 'ContextError: mgpu.collectives=nccl, but ' in refused


@pytest.mark.slow
@FAILURES
def test_the_host_adds_once_nccl_has_failed(after, kind, sharded):
    """At first, the step in which it failed was an error. The trial, the first sum, the fourth and the 50th fail."""
    check_of_failure(run(failing(after, kind, sharded, "'dev0->cuda0;dev1->cuda1'", 0)), kind)


@pytest.mark.slow
@pytest.mark.mpi
@FAILURES
def test_the_host_adds_once_nccl_has_failed_on_one_of_two_ranks(after, kind, sharded, tmp_path):
    code = failing(after, kind, sharded, '', 1)
    check_of_failure(launched(2, code, tmp_path, 2, flags='mgpu.timeout=20'), kind)


@pytest.mark.slow
@pytest.mark.mpi
def test_an_exchange_beside_the_next_gradients_fails_on_one_of_two_ranks(tmp_path):
    code = 'from theano_mgpu.plan import buckets\nbuckets.LEAST = 1\n' + failing(3, 2, True, '', 1)
    check_of_failure(launched(2, code, tmp_path, 2, flags='mgpu.timeout=20,mgpu.overlap=True'), 2)


TRIAL = TRAINING + """
from theano_mgpu.utils import rank_process
told = []
rank_process.say = told.append
nccl.ncclOnCpuFailAfter(ctypes.c_long(GROUPS), 100)
step, _ = trained('auto', 2, sizes=(6, 4))
print(by(step), *[line for line in told if 'NCCL' in line])
"""


@pytest.mark.slow_but_with('6-a sum of 1048576 of float32')
@pytest.mark.parametrize('groups, text', [(1, 'a broadcast of 1 of float32'), (2, 'a message of 1 of float32'), (
    6, 'a sum of 1048576 of float32')])
def test_a_wrong_result_in_the_trial_is_named(groups, text):
    line, = run(TRIAL.replace('GROUPS', str(groups)))
    assert line.startswith('the host ') and text in line


def test_the_host_adds_where_there_is_too_little_memory_for_the_first_exchange():
    line, = run(TRIAL.replace('GROUPS', '-1'), memory='64M', nccl_memory='80M')
    assert line.startswith('the host ') and 'error 1, unhandled cuda error' in line


def test_a_first_exchange_that_hangs_is_not_waited_for_again(tmp_path):
    """Each process waited for mgpu.timeout, 10 minutes, without a word."""
    def lines(variable, **settings):
        env = dict(os.environ, NCCL_DEBUG_FILE=str(tmp_path / variable))  # no other test's outcome counts
        line, = run(TRIAL.replace('GROUPS', '-1'), flags='mgpu.timeout=1', base=env, **settings)
        return line
    hang = 'NCCL has not ended the first exchange of values within 1 s. '
    first = lines('a', nccl_hang=True)
    assert first.startswith('the host ') and hang in first and 'NCCL_P2P_DISABLE=1' in first and '(ACS)' in first
    again = lines('a', nccl_hang=True, nccl_abort_ms=60000)  # it would wait for the abort
    assert 'in an earlier process, ' + hang in again and 'does not work here' not in again
    kept, = re.findall(r'or (\S+) is deleted', again)
    assert lines('b').startswith('NCCL')  # with another variable it is tried
    assert lines('a').startswith('the host ')
    os.remove(kept)
    assert lines('a').startswith('NCCL')


MESSAGES = """
import ctypes
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.devices.exchange_operations import BROADCAST, EVERY, MESSAGE, NO_COPIES, Collectives
from theano_mgpu.devices.nccl import communicator_of, connect
from theano_mgpu.devices.transfers import DeviceMemory
contexts = mgpu.init(3)
assert connect(contexts, Communicator()) == ''
rows = [DeviceMemory(context).contiguous(np.arange(8, dtype='float32') + 10 * i) for i, context in enumerate(contexts)]

def at(i, place):
    return rows[i][place:].gpudata
# The first two elements go from device 0 to 2, the next two from 2 to 1; device 1 has the last one of all.
send = np.array([[at(0, 0), 0, at(0, 7)], [0, 0, at(1, 7)], [0, at(2, 2), at(2, 7)]], 'uint64')
receive = np.array([[0, 0, at(0, 7)], [0, at(1, 4), at(1, 7)], [at(2, 5), 0, at(2, 7)]], 'uint64')
communicator = communicator_of(contexts, 1)
communicator.exchange(NO_COPIES, Collectives(
    send, receive, np.array([2, 2, 1], 'uint64'), np.full(3, 7, 'int32'),
    *[np.array(each, 'int32') for each in ([MESSAGE, MESSAGE, BROADCAST], [0, 2, 1], [2, 1, EVERY])]))
communicator.wait()
for row in rows:
    print(np.asarray(row).astype(int).tolist())
"""


@pytest.mark.slow
def test_messages_from_one_device_to_another():
    assert list(map(eval, run(MESSAGES, 3, delay_us=200))) == [
        [0, 1, 2, 3, 4, 5, 6, 17], [10, 11, 12, 13, 22, 23, 16, 17], [20, 21, 22, 23, 24, 0, 1, 17]]


def test_an_nccl_that_has_no_messages_is_too_old(tmp_path):
    (tmp_path / 'old.c').write_text('int ncclGetVersion(int *version) { return *version = 2604, 0; }')
    path = str(tmp_path / 'libnccl.so.2')
    subprocess.run(['g++', '-x', 'c', '-shared', '-fPIC', '-o', path, str(tmp_path / 'old.c')], check=True)
    with pytest.raises(ExchangeError, match='is NCCL 2.6; 2.7 is the oldest that can be used'):
        Nccl(path, None)


RENAMED = TRAINING + '''
def weights(contexts, collectives):
    mgpu.init(contexts)
    x, w = T.matrix('x'), theano.shared(np.ones(3, floatX))
    with theano.configparser.change_flags(**{'mgpu.collectives': collectives}):
        step = mgpu.training_function([x], T.sqr(T.dot(x, w) - 3).mean(), [w], lambda gradients: [
            (w, w - T.cast(.1, floatX) * gradients[0])])
    return step, w
pairs = 'dev0->cuda0;dev1->cuda1', 'a->cuda0;b->cuda1', 'dev0->cuda0;b->cuda1', 'b->cuda1;a->cuda0'
made = [weights(pair, collectives) for pair in pairs for collectives in ('nccl', 'host')]
for batch in np.random.RandomState(0).rand(3, 8, 3).astype(floatX):
    for step, _ in made:  # by turns: no function keeps the devices of another one
        step(batch)
for step, w in made:
    print(by(step), np.round(w.get_value(), 4).tolist())
'''


@pytest.mark.slow
def test_devices_by_other_names_have_a_communicator_of_their_own():
    """The sums were zero with two new names for two devices; with one new name, half of each sum was missing."""
    lines = run(RENAMED, delay_us=200, nccl_delay_us=100)
    assert [line.partition(' [')[0] for line in lines] == ['NCCL', 'the host'] * 4
    assert len({line.partition('[')[2] for line in lines}) == 1


FREES = TRAINING + '''
import threading
from pygpu import gpuarray
from theano_mgpu.devices import page_locked
from theano_mgpu.devices.contexts import gpu_context
step, params = trained('nccl', 2, sizes=(6, 4))
step(*next(batches(1)))
ended, freed = threading.Event(), []
def free():
    while not ended.is_set():
        MADE
        freed.append(1)
thread = threading.Thread(target=free)
thread.start()
for batch in batches(8):
    step(*batch)
ended.set()
thread.join()
print(by(step), len(freed) > 0)
'''


@pytest.mark.slow
@pytest.mark.parametrize('made', ["page_locked.zeros(100, 'f4', mgpu.contexts())",
                                  "gpuarray.empty(100, 'f4', context=gpu_context(mgpu.contexts()[1]))"])
def test_another_thread_frees_memory_during_exchanges(made):
    """The free waited for the device of the first launch, and the second launch for the free, until the timeout."""
    code = FREES.replace('MADE', made)
    assert run(code, flags='mgpu.timeout=5,gpuarray.preallocate=-1', nccl_delay_us=3000)[-1] == 'NCCL True'


LOST_EARLIER = TRAINING + '''
from pygpu import gpuarray
from pygpu.elemwise import elemwise2
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.devices.nccl import NcclCommunicator
step, params = trained('auto', 2, sizes=(6, 4))
for batch in batches(2):
    step(*batch)
before = values(params)
array = gpuarray.zeros((4,), 'float32', context=gpu_context(mgpu.contexts()[1]))
def lost(self, copies, collectives):
    cuda.cudaOnCpuFailAfter(1, ctypes.c_long(0), 719)
    try:
        elemwise2(array, '+', array, array).sync()
    except gpuarray.GpuArrayException:
        raise mgpu.ExchangeError('cuda1 failed before the devices had exchanged their values', self.contexts[1])
NcclCommunicator.begin = lost
print(fails(lambda: step(*next(batches(1))))[0])
print(all((a == b).all() for a, b in zip(before, values(params))))
'''


@pytest.mark.slow
def test_a_device_that_is_lost_before_an_exchange_is_named():
    """An ExchangeError was raised. The driver knows of the loss now before the exchange, now after it."""
    error, same = run(LOST_EARLIER)
    assert error.startswith('ReplicaError: replica 1 (context dev1->cuda1, samples 4 to 7) failed, nothing was changed')
    assert same == 'True'


COPIES = TRAINING + '''
step, params = trained('auto', 2, sizes=(6, 300, 300, 4), normalise=False)
step(*next(batches(1)))
start = time.clock_gettime(time.CLOCK_MONOTONIC)
for batch in batches(3):
    step(*batch)
print(start, time.clock_gettime(time.CLOCK_MONOTONIC))
'''


@pytest.mark.slow
def test_gradients_are_not_copied_to_the_host(tmp_path):
    start, stop = map(float, run(COPIES, flags='mgpu.cuda_graphs=off', trace=tmp_path / 'trace')[0].split())
    copies = [line.split() for line in (tmp_path / 'trace').read_text().splitlines()]
    copies = [line for line in copies if line[2] == 'DtoH' and start < float(line[0]) < stop]
    assert 0 < len(copies) <= 3 and all(int(line[-1]) < 100 for line in copies), copies  # the loss of each step


HANGS = TRAINING + '''
step, params = trained('auto', 2, normalise=False)
for batch in batches(2):
    step(*batch)
began = time.time()
# A device that does not come: its part of the exchange is left out.
from theano_mgpu.devices import nccl as module
begin = module.NcclCommunicator.begin
def without_one(self, copies, reductions):
    library = self._library
    original = ctypes.cast(nccl.ncclAllReduce, ctypes.c_void_p).value
    skip = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                            ctypes.c_void_p, ctypes.c_void_p)
    first = []
    nccl.ncclAllReduce.argtypes = skip._argtypes_
    call = skip(lambda *args: 0 if first or first.append(1) else nccl.ncclAllReduce(*args))
    addresses = [self._nccl.address(name) for name in module.FUNCTIONS]
    addresses[module.FUNCTIONS.index('ncclAllReduce')] = ctypes.cast(call, ctypes.c_void_p).value
    library.mgpu_use(module.pointers(addresses))
    self.kept = call
    return begin(self, copies, reductions)
module.NcclCommunicator.begin = without_one
print(fails(lambda: step(*next(batches(1)))))
print(time.time() - began < 20)
other, others = trained('host', 2, normalise=False)
[other(*batch) for batch in [*batches(2), *batches(1)]]
print(all(np.allclose(a, b, 1e-3, 1e-4) for a, b in zip(values(params), values(others))))
'''


@pytest.mark.slow
def test_a_device_that_does_not_come_is_not_waited_for_beyond_the_timeout():
    assert run(HANGS, flags='mgpu.timeout=2') == ["('', [])", 'True', 'True']


HANGING = TRAINING + '''
import signal, threading
step, params = trained('auto', 2, sizes=(6, 4))
for batch in batches(2):
    step(*batch)
before = values(params)
nccl.ncclOnCpuFailAfter(ctypes.c_long(0), 101)  # it does not end, although all devices come
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    step(*list(batches(3))[2])
except KeyboardInterrupt:
    print('interrupted')
'''


@pytest.mark.slow
def test_ctrl_c_ends_a_step_while_an_abort_does_not_return():
    """The main thread waited with it, in C."""
    assert run(HANGING.replace('SECONDS', '3'), flags='mgpu.timeout=1', nccl_abort_ms=600000) == ['interrupted']


INTERRUPTED = HANGING.replace('SECONDS', '1') + '''
print(all((a == b).all() for a, b in zip(before, values(params))))
losses = [step(*batch) for batch in list(batches(6))[2:]]
other, others = trained('host', 2, sizes=(6, 4))
expected = [other(*batch) for batch in batches(6)]
print(np.allclose(losses, expected[2:], 1e-4), all(np.allclose(*each, 1e-3, 1e-4) for each in zip(
    values(params), values(others))))
'''


def test_ctrl_c_ends_an_exchange_that_hangs_and_the_next_steps_are_right():
    assert run(INTERRUPTED, flags='mgpu.timeout=4', delay_us=200) == ['interrupted', 'True', 'True True']


LONELY = '''
import subprocess, sys
from theano_mgpu.devices import nccl as module
from theano_mgpu.devices.exchange_operations import EVERY, NO_COPIES, Collectives
from theano_mgpu.devices.contexts import primary_context
from theano_mgpu.devices.transfers import DeviceMemory
if len(sys.argv) == 1:
    contexts, first = mgpu.init('a->cuda0;b->cuda1'), 0
else:
    contexts, first = mgpu.init('c->cuda2;d->cuda3'), 2
nccl = module.load(module.cuda_libraries.survey().libraries['libnccl.so'].path)
primary = list(map(primary_context, contexts))
unique = bytes.fromhex(sys.argv[1]) if first else nccl.unique_id(primary[0])
if not first:
    subprocess.Popen([sys.executable, '-c', open('/proc/self/cmdline').read().split(chr(0))[2], unique.hex()])
communicator = module.NcclCommunicator(contexts, nccl, nccl.connect(primary, first, 4, unique), first, 4)
if first:
    sys.exit()
arrays = [DeviceMemory(context).zeros((8,), 'float32') for context in contexts]
addresses, one = np.array([[array.gpudata] for array in arrays], 'uint64'), np.zeros(1, 'int32')
try:
    communicator.exchange(NO_COPIES, Collectives(addresses, addresses, np.array([8], 'uint64'), one + 7, one,
                                                 one + EVERY), 1)
except mgpu.ExchangeError as error:
    print(error)
print(communicator.has_failed)
'''


@pytest.mark.slow
def test_nothing_is_freed_beside_a_call_that_waits_for_another_process():
    """The call waits within NCCL for ranks of a process that has ended, and uses what the last abort frees."""
    error, failed = run(LONELY, 4, nccl_abort_ms=0)
    assert 'NCCL has not ended the first exchange of values within 1 s' in error and failed == 'True'


BESIDE = '''
import ctypes
from pygpu.elemwise import elemwise2
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.devices.exchange_operations import EVERY, NO_COPIES, Collectives
from theano_mgpu.devices.nccl import communicator_of, connect
from theano_mgpu.devices.transfers import DeviceMemory
contexts = mgpu.init(2)
assert connect(contexts, Communicator()) == ''
communicator = communicator_of(contexts, 1)
n = 200000

def on_all(value):
    return [DeviceMemory(context).contiguous(np.full(n, value, 'float32')) for context in contexts]

def doubled(arrays):
    return [elemwise2(array, '+', array, array) for array in arrays]

def begin(arrays, out):
    send, receive = [np.array([[each.gpudata] for each in each_of], 'uint64') for each_of in (arrays, out)]
    one = np.zeros(1, 'int32')
    return communicator.begin(NO_COPIES, Collectives(send, receive, np.array([n], 'uint64'), one + 7, one, one + EVERY))

for i in range(20):  # what is computed before is sent; what is computed after `join` has it
    parts = doubled(doubled(on_all(i)))
    out = on_all(-1)
    number = begin(parts, out)
    others = doubled(doubled(on_all(-1)))
    communicator.join(number)
    totals = doubled(out)
    del parts, out  # their memory is used again, in the order of what the devices compute
    again = doubled(on_all(-9))
    assert all((np.asarray(total) == 16 * i).all() for total in totals), i
    assert all((np.asarray(each) == -4).all() for each in others)
ctypes.CDLL('libnccl.so.2').ncclOnCpuFailAfter(ctypes.c_long(0), 101)
one, two = on_all(1), on_all(2)
number = begin(one, two)
print([float(np.asarray(each)[0]) for each in doubled(one)])  # beside an exchange that does not end
communicator.give_up()
'''


@pytest.mark.slow
def test_devices_compute_beside_an_exchange_and_in_its_order():
    assert run(BESIDE, 2, delay_us=300, nccl_delay_us=300) == ['[2.0, 2.0]']


OVERLAPPED = TRAINING.replace(INIT, 'mgpu.init(CONTEXTS)') + '''
from theano_mgpu.plan import buckets
buckets.LEAST, results = 1, []
for overlaps in ('True', 'False'):
    with theano.configparser.change_flags(**{'mgpu.overlap': overlaps, 'mgpu.shares': 'equal'}):
        step, params = trained('nccl', N, sizes=(6, 120, 120, 120, 4), **OPTIONS)  # memory is used again
    # Of the later batches, each part is a CUDA graph.
    every = [*batches(10), *batches(10, (8,))]
    results.append([step(*batch) for batch in every] + values(params))
    print(by(step), step.plan.overlaps, len(step.plan.stages[-1].parts) > 1)
print(all((a == b).all() for a, b in zip(*results)))
'''
OVERLAPS = ['NCCL True True', 'NCCL False False', 'True']


def overlapped(n, contexts, **options):
    return OVERLAPPED.replace('N,', '%d,' % n, 1).replace('CONTEXTS', contexts).replace('OPTIONS', repr(options))


@pytest.mark.slow
@pytest.mark.parametrize('n,options', [
    (2, {}), (4, {}), (2, {'micro_batches': 2, 'normalise': False}),
    (4, {'executor': 'threads', 'update_on': 'sharded'})])
def test_sums_beside_the_next_gradients_have_the_same_bits(n, options):
    """Batches are ragged, and each sum of batch normalisation is beside the gradients of others, too."""
    assert run(overlapped(n, str(n), **options), n, delay_us=1000, nccl_delay_us=300) == OVERLAPS


@pytest.mark.slow
@pytest.mark.mpi
def test_sums_over_two_processes_beside_the_next_gradients_have_the_same_bits(tmp_path):
    assert launched(2, overlapped(4, ''), tmp_path, 4, delay_us=300, nccl_delay_us=300) == OVERLAPS


DECIDED = TRAINING + '''
step, params = trained('auto', 2, sizes=(6, 900, 900, 4), normalise=False)
def exchange():
    return next(choice for choice in step.plan.choices if choice.what == 'exchange')
print(exchange().chosen, '|', exchange().reason, '|', step.is_settled)
losses = [step(*batch) for batch in batches(14)]
print(exchange().chosen, '|', exchange().reason, '|', len(step.plan.stages[0].parts), step.is_settled)
other, others = trained('host', 2, sizes=(6, 900, 900, 4), normalise=False)
print(np.allclose(losses, [other(*batch) for batch in batches(14)], 1e-4))
'''


@pytest.mark.slow
def test_an_exchange_that_takes_long_is_cut_into_pieces_once_steps_are_timed():
    before, after, same = run(DECIDED, nccl_rate=50)
    for found, expected in ((before, r'once all .* mgpu.overlap=auto: it takes .* ms at 0.0\d+ GB/s, and .* \| False'),
                            (after, r'while the next .* \| mgpu.overlap=auto: it took \d+ % of a step, .* \| 2 True')):
        assert re.match(expected, found), found
    assert same == 'True'


REFUSED = TRAINING + '''
for contexts in ('a->cuda0;b->cuda0', 'a->cpu;b->cpu'):
    mgpu.init(contexts)
    x = T.matrix()
    w = theano.shared(np.ones((6, 6), floatX))
    with theano.configparser.change_flags(**{'mgpu.collectives': 'nccl'}):
        print(fails(lambda: mgpu.training_function([x], T.dot(x, w).mean(), [w], lambda g: {w: w - g[0]})))
'''


def test_nccl_that_is_asked_for_and_cannot_be_used_is_an_error():
    error, cpu = run(REFUSED)
    assert 'ContextError: mgpu.collectives=nccl, but two replicas are on one device. Set it to auto or host' in error
    assert 'not all replicas are on CUDA devices' in cpu


RANKS = TRAINING.replace(INIT, 'mgpu.init()') + """
results = []
for collectives in ('nccl', 'host'):
    step, params = trained(collectives, 4, normalise=False)
    losses = [step(*batch) for batch in batches(30, (8, 13, 16, 9, 3, 1))]
    results.append(losses + values(params))
print(by(step), max(abs(np.asarray(a) - b).max() for a, b in zip(*results)) < 1e-5)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes_with_two_devices_each(tmp_path):
    """Some batches leave a process without samples."""
    assert launched(2, RANKS, tmp_path, 4) == ['the host True']


def test_what_sums_through_the_host_cost_is_said():
    """Several cards may be slower than one where NCCL cannot be used, and nothing said why."""
    code = TRAINING + '''
from theano_mgpu.plan.record import changes
step, _ = trained('auto', 2, sizes=(6, 500, 500, 4), normalise=False)
for batch in batches(20):
    step(*batch)
print(*[each for each in changes if 'go through the host' in each])
'''
    line, = run(code, base=dict(os.environ, CUDA_LAUNCH_BLOCKING='1'), copy_rate=100)
    found = re.search(r'the host, (\S+) of (\S+) ms of a step: CUDA_LAUNCH_BLOCKING=1$', line)
    taken, whole = map(float, found.groups())
    assert .15 * whole < taken < whole
    assert run(code, base=dict(os.environ, THEANO_FLAGS=''), flags='mgpu.collectives=host', copy_rate=100) == ['']
