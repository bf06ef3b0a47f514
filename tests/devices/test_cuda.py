"""CUDA alone: contexts that libgpuarray leaves current, faults of devices, forks; each in a process on the stand-in.

The behaviour that CUDA shares with other devices is tested by `make test-cuda`: it runs all tests on the stand-in.
"""

import cuda_on_cpu
import pytest
from support.standin import run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                 reason=cuda_on_cpu.unavailable() or '')]


TWO_RAW_CONTEXTS = '''
import pygpu
from pygpu.gpuarray import GpuArray, GpuArrayException, GpuKernel
from theano_mgpu.devices import discovery
from theano_mgpu.devices import cuda_contexts
discovery.discover('cuda')
contexts = [pygpu.init('cuda%d' % i) for i in (0, 1)]
'''

LEFT = TWO_RAW_CONTEXTS + '''
def in_vain():
    """Calls that fail within libgpuarray."""
    for context in contexts:
        for attempt in (lambda: GpuKernel('KERNEL void f( {', 'f', [GpuArray], context=context),
                        lambda: pygpu.empty((1 << 40,), 'float32', context=context)):
            try:
                attempt()
            except GpuArrayException:
                continue
            raise AssertionError('this should fail')

print('shipped', [cuda_contexts.entries_left(context) > 0 for context in contexts])
for context in contexts:
    cuda_contexts.protect(context)
    cuda_contexts.protect(context)
in_vain()
print('patched', [cuda_contexts.entries_left(context) for context in contexts],
      [cuda_contexts.entries(context) for context in contexts])
free = [context.free_gmem for context in contexts]
array = pygpu.empty((8 << 20,), 'float32', context=contexts[0])
taken = [before - context.free_gmem >> 20 for before, context in zip(free, contexts)]
array[:] = np.float32(2)
print('taken', taken, np.asarray(array)[-1])
'''


@pytest.mark.slow
def test_a_kernel_that_is_made_twice_leaves_no_context_current():
    """libgpuarray left one: work on cuda0 then used cuda1's memory, "CUDA_ERROR_INVALID_HANDLE"."""
    shipped, patched, taken = run(LEFT, sources='')  # `make test-nvrtc` must not see its wrong kernel
    assert patched == 'patched [0, 0] [0, 0]' and taken == 'taken [32, 0] 2.0'
    assert shipped == 'shipped [True, True]', 'this libgpuarray is right by itself: is the patch still needed?'


THREADS = TWO_RAW_CONTEXTS + '''
import sys, threading
sys.setswitchinterval(1e-6)
for context in contexts:
    cuda_contexts.protect(context)
failures = []
shared = [pygpu.array(np.full(1 << 16, i, 'float32'), context=context) for i, context in enumerate(contexts)]

def work(number):
    """Copies let go of Python's lock: two threads come into each context."""
    try:
        for i in range(300):
            which = (number + i) % 2
            assert (np.asarray(shared[which]) == which).all()
            fresh = pygpu.array(np.full(1 << 12, i, 'float32'), context=contexts[which])
            assert (np.asarray(fresh) == i).all()
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failures, [cuda_contexts.entries(context) for context in contexts])
'''


@pytest.mark.slow
def test_threads_take_turns_in_a_context():
    """libgpuarray counts the entries into a context without a lock: CUDA_ERROR_INVALID_CONTEXT, wrong devices."""
    assert run(THREADS, delay_us=50) == ['[] [0, 0]']


FORKED_IN_A_CALL = TWO_RAW_CONTEXTS + '''
import os, signal, threading, time
cuda_contexts.protect(contexts[0])
large, copying = pygpu.zeros((1 << 22,), 'float32', context=contexts[0]), True

def copy():
    while copying:
        np.asarray(large)

thread = threading.Thread(target=copy)
thread.start()
codes = []
for _ in range(10):
    array = pygpu.zeros((16,), 'float32', context=contexts[0])
    time.sleep(.01)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        del array
        os._exit(0)
    codes.append(os.waitpid(child, 0)[1])
copying = False
thread.join()
print(codes)
'''


@pytest.mark.slow
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have():
    """The thread is in the context, and has its lock, when a process forks: data generators do so."""
    assert run(FORKED_IN_A_CALL) == [str([0] * 10)]


TRANSFER = '''
import pygpu
from pygpu import elemwise
from theano_mgpu.devices import discovery
from theano_mgpu.devices import cuda_contexts
discovery.discover('cuda')
contexts = [pygpu.init('cuda%d' % i, single_stream=True) for i in (0, 1)]
for context in contexts:
    cuda_contexts.protect(context)
slow = elemwise.GpuElemwise(contexts[0], 'b = a; for (int i = 0; i < 100000; ++i) b += sinf(b)',
                            [elemwise.arg('a', 'float32', read=True), elemwise.arg('b', 'float32', write=True)])
given = pygpu.array(np.ones(64, 'float32'), context=contexts[0])
made = pygpu.zeros((64,), 'float32', context=contexts[0])
slow(given, made)
copied = made.transfer(contexts[1])
print((np.asarray(copied) == np.asarray(made)).all())
'''


@pytest.mark.slow
def test_a_copy_between_devices_waits_for_its_source():
    """libgpuarray waited for an event that is not recorded with one stream, Theano's default."""
    assert run(TRANSFER) == ['True']


TRAINED = '''
import ctypes
from support.small_models import data, dense_model
from models import adam
cuda = ctypes.CDLL('libcuda.so')
state = {}

def updates(gradients, params):
    state.update(adam(gradients, params))
    return state

def values():
    return [variable.get_value() for variable in state]

def equal(one, other):
    return all((a == b).all() for a, b in zip(one, other))

def trained(contexts, executor='auto', **more):
    state.clear()
    mgpu.init(contexts)
    model = dense_model()
    return model, mgpu.training_function(model.inputs, model.loss, model.params, updates, executor=executor, **more)

x, labels = data(11, 7)
'''

LOST = TRAINED + '''
model, step = trained('dev0->cuda0;dev1->cuda1', executor=EXECUTOR)
after = []
for _ in range(5):
    step(x, labels)
    after.append(values())

model, step = trained('dev0->cuda0;dev1->cuda1', executor=EXECUTOR)
step(x, labels)
cuda.cudaOnCpuFailAfter(1, ctypes.c_long(AFTER), 719)
done = 1
try:
    while True:
        step(x, labels)
        done += 1
except mgpu.ReplicaError as error:
    print(error)
print(equal(values(), after[done - 1]))

# What the other device has is enough to go on there.
before = values()
mgpu.init('dev0->cuda0')
go_on = mgpu.training_function(model.inputs, model.loss, model.params, lambda gradients: {
    param: param - np.float32(.1) * gradient for param, gradient in zip(model.params, gradients)})
print(np.isfinite(go_on(x, labels)), not equal(values(), before))
'''


@pytest.mark.slow
@pytest.mark.parametrize('executor,after', [('serial', 10), ('threads', 75)])
def test_a_device_that_is_lost_in_a_step_loses_no_value(executor, after):
    """A device is lost after `after` launches, in the gradients of a step or in an update; the next step reports it."""
    message, same, went_on = run(LOST.replace('EXECUTOR', repr(executor)).replace('AFTER', str(after)))
    assert message.startswith('replica 1 (context dev1->cuda1, ') and 'nothing was changed' in message
    assert 'cuda1 has failed for good in this process; the values on dev0->cuda0 are those before this step' in message
    assert same == 'True' and went_on == 'True True'


MEMORY = TRAINED + '''
model, step = trained('dev0->cuda0;dev1->cuda1')
never = []
for _ in range(3):
    never.append(step(x, labels))
expected = values()

model, step = trained('dev0->cuda0;dev1->cuda1', micro_batches=1)
losses, messages = [], set()
for after in (0, 7, 30):
    before = values()
    cuda.cudaOnCpuFailAllocAfter(1, ctypes.c_long(after))
    try:
        step(x, labels)
        messages.add('no error after %d' % after)
    except mgpu.ReplicaError as error:
        messages.add(str(error).partition(' failed')[0])
        assert equal(values(), before) and 'OUT_OF_MEMORY' in str(error) or 'allocate' in str(error)
    cuda.cudaOnCpuFailAllocAfter(1, ctypes.c_long(-1))
    losses.append(step(x, labels))
print(sorted(messages))
print(equal(losses, never), equal(values(), expected))
'''


@pytest.mark.slow
def test_a_step_that_was_short_of_memory_can_be_repeated():
    """A device lacks memory in the gradients and in the update: nothing is changed, and the step can be repeated."""
    *_, messages, same = run(MEMORY, flags='gpuarray.preallocate=-1')  # else libgpuarray has memory of its own
    replica = 'replica 1 (context dev1->cuda1, %s)'
    assert messages == str([replica % 'samples 6 to 10', replica % 'update'])
    assert same == 'True True'


MODELS = TRAINED + '''
_, step = trained('dev0->cuda0')
one = [step(x, labels) for _ in range(5)], values()
_, step = trained('dev0->cuda0;dev1->cuda1')
two = [step(x, labels) for _ in range(5)], values()
print([function.mgpu_optimised.context.name for function in step.functions[:2]])
for a, b in zip(one[0] + one[1], two[0] + two[1]):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
'''


@pytest.mark.slow
@pytest.mark.parametrize('names,compiled', [
    ('GPU A;GPU B', "['dev0', 'dev1']"),
    ('GPU A;GPU A', "['dev0', 'dev0']")])
def test_devices_of_different_models_are_compiled_for(names, compiled):
    """A graph that was optimised for one type of device may not be right for another."""
    assert run(MODELS, names=names) == [compiled]


FORKED = TRAINED.replace("cuda = ctypes.CDLL('libcuda.so')", '') + '''
from multiprocessing import get_context
device = DEVICE
model, step = trained('dev0->%s;dev1->%s' % (device, device))
step(x, labels)

def child(call):
    try:
        call()
    except mgpu.ContextError as error:
        print(error, flush=True)

for call in (lambda: step(x, labels), lambda: model.params[0].get_value(), lambda: mgpu.init('new->' + device)):
    process = get_context('fork').Process(target=child, args=(call,))
    process.start()
    process.join(60)
    print(process.exitcode)
print(np.isfinite(step(x, labels)))
'''


@pytest.mark.slow
@pytest.mark.parametrize('device', ['cuda0', 'opencl0:0'])
def test_a_fork_is_told_that_it_has_no_gpu(device):
    """CUDA failed in a fork with "initialization error", OpenCL did not return."""
    lines = run(FORKED.replace('DEVICE', repr(device)))
    assert lines[1::2] == ['0', '0', '0'] and lines[-1] == 'True'
    assert all('was forked from process' in line and 'spawn' in line for line in lines[:-1:2])


SHARED_NAME = '''
import theano, theano.tensor as T
mgpu.init('dev0->%s' % DEVICE)
x = T.fvector()
print(mgpu.function([x], T.maximum(x, 1), contexts=['dev0'])(np.arange(3, dtype='float32')).tolist())
'''


@pytest.mark.slow
@pytest.mark.parametrize('devices', [('cuda0', 'opencl0:0'), ('opencl0:0', 'cuda0')])
def test_code_of_one_kind_of_device_is_not_used_for_another(devices, tmp_path):
    """Theano keeps code by the context's name: on OpenCL, CUDA's elementwise kernels ended the process."""
    for device in devices:
        found = run(SHARED_NAME.replace('DEVICE', repr(device)), flags='base_compiledir=%s' % tmp_path)
        assert found == ['[1.0, 1.0, 2.0]']


DOCTOR = '''
from theano_mgpu import cli
sys.exit(cli.main(['doctor']))
'''


def test_the_doctor_says_that_libgpuarray_leaks_and_that_the_patch_holds():
    lines = run(DOCTOR, flags='contexts=dev0->cuda0;dev1->cuda1')
    found = next(line for line in lines if line.startswith('libgpuarray'))
    assert found.split()[1] == 'ok' and 'with the patch of theano_mgpu it does not, on cuda0 and cuda1' in found
    assert lines[-2] == 'All that is needed works.'
    assert lines[-1] == 'Advice: theano-mgpu run train.py runs a Keras or Theano script, unchanged, on dev0, dev1.'
