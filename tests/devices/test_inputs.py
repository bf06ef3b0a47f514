"""Inputs that are copied beside what a CUDA device computes: the same bits, in the right order; on the stand-in."""
import cuda_on_cpu
import pytest
from support.standin import run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

BUFFERS = '''
import gc, time
from pygpu import gpuarray
from cuda_on_cpu import driver
from theano_mgpu.devices import copies, page_locked
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.devices.cuda_contexts import stream_of
from theano_mgpu.devices.transfers import DeviceBuffers
context, = mgpu.init('a->cuda0')
there = gpu_context(context)
def made():
    return [DeviceBuffers(context, is_beside=True) for _ in range(2)]
'''

ORDER = BUFFERS + '''
rng, buffers, right = np.random.RandomState(0), made(), []
values, results = np.empty((400, 100), 'float32'), []
for i in range(40):
    n = rng.randint(200, 400) if i > 20 else 400
    for key in 'xy':
        values[:n] = i + (key == 'y')  # it is changed at once for the next one
        results.append((i + (key == 'y'), n, buffers[i % 2].send(key, values[:n, ::-1])))
    with buffers[i % 2].read():
        results[-2:] = [(number, n, array.copy()) for number, n, array in results[-2:]]
print(all(array.shape == (n, 100) and (np.asarray(array) == number).all() for number, n, array in results))
'''


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{'delay_us': 2000}, {'sync': 1}, {'copy_rate': 100}])
def test_values_wait_for_what_has_read_the_ones_before_and_are_waited_for(settings):
    """Values of several keys and of changing lengths are sent in turn to two memories, and copied on the device."""
    assert run(ORDER, **settings) == ['True']


def test_large_values_are_copied_by_several_threads():
    code = ORDER.replace('rng, buffers', 'copies.PIECE, copies._fillers, rng, buffers').replace(
        '= np.random', '= 10000, lambda: 3, np.random')
    assert run(code, delay_us=300) == ['True']


RETURNS = BUFFERS + '''
device = driver.Device(0)
device.stream = stream_of(there)
buffers, values = made()[0], np.ones(LENGTH, 'float32')
buffers.send('x', values)
hold = driver.Hold(device, device.allocate(4))
array = buffers.send('x', values + 1)
print(hold.flag.value)
with buffers.read():
    copy = array.copy()
hold.release()
print((np.asarray(copy) == 2).all())
'''


@pytest.mark.slow_with('100')
@pytest.mark.parametrize('length', [100, 1 << 20])
def test_the_host_does_not_wait_for_the_device(length):
    assert run(RETURNS.replace('LENGTH', str(length))) == ['0', 'True']


FREED = BUFFERS + '''
import threading
kept, memory, device, buffers, zeros = [], page_locked.memory, driver.Device(0), made(), np.zeros(1 << 16, 'float32')
page_locked.memory = lambda *arguments: kept.append(memory(*arguments)) or kept[-1]  # to free it would wait
device.stream = copies._streams(context)[1]
address = buffers[0].send('x', zeros).gpudata
hold = driver.Hold(device, device.allocate(4))
buffers[0].send('x', zeros)
del buffers
gc.collect()  # the memory on the device is free at once
threading.Timer(.2, hold.release).start()
other = gpuarray.empty(1 << 16, 'float32', context=there)
other[...] = 1
print(other.gpudata == address)
device.synchronize()
print((np.asarray(other) == 1).all())
'''


@pytest.mark.slow
def test_memory_that_is_freed_is_not_written_later():
    assert run(FREED) == ['True', 'True']


REUSED = BUFFERS + '''
array, device, buffers = gpuarray.array(np.ones(1 << 16, 'float32'), context=there), driver.Device(0), made()[0]
device.stream = stream_of(there)
buffers.send('x', np.zeros(1 << 15, 'float64'))  # to lock pages, and to load a kernel, would wait for the device
array.copy().sync()
hold, address = driver.Hold(device, device.allocate(4)), array.gpudata
copy = array.copy()
del array
print(buffers.send('x', np.zeros(1 << 16, 'float32')).gpudata == address)
time.sleep(.1)
hold.release()
print((np.asarray(copy) == 1).all())
'''


@pytest.mark.slow
def test_memory_that_the_device_still_reads_is_not_written():
    assert run(REUSED) == ['True', 'True']


TRAINING = '''
import theano, theano.tensor as T
from theano_mgpu.devices import copies, page_locked, transfers
mgpu.init('a->cuda0;b->cuda1')
sent = []
original = copies.InputsBeside.send
def send(self, key, value):
    result = original(self, key, value)
    sent.append(result is not None)
    return result
copies.InputsBeside.send = send

def trained(looks_ahead):
    rng, x, t = np.random.RandomState(0), T.matrix('x'), T.vector('t')
    params = [theano.shared((rng.randn(*shape) / 30).astype('float32')) for shape in ((600, 30), (30,))]
    loss = T.sqr(T.dot(T.tanh(T.dot(x, params[0])), params[1]) - t).mean()
    step = mgpu.training_function([x, t], loss, params, lambda gradients, params: [
        (param, param - np.float32(.01) * gradient) for param, gradient in zip(params, gradients)], OPTIONS)
    batches = [(rng.randn(n, 600).astype('float32'), rng.randn(n).astype('float32'))
               for n in (128, 128, 100, 128, 7, 128, 128, 150)]
    losses = []
    for batch, later in zip(batches, batches[1:] + [None]):
        with step.look_ahead.asking((lambda: later) if looks_ahead else None):
            losses.append(step(*batch))
    return [np.asarray(each) for each in losses] + [param.get_value() for param in params]

found = [trained(True), trained(False)]
print(len(sent), all(sent))
page_locked.memory = lambda size, contexts: None
found.append(trained(True))
print(any(sent[-8:]))
transfers.LEAST = 1 << 40
n = len(sent)
found.append(trained(True))
print(len(sent) - n, all((one == other).all() for each in found[:-1] for one, other in zip(each, found[-1])))
'''


@pytest.mark.slow_but_with("executor='threads'-settings3")
@pytest.mark.parametrize('options, settings', [
    ('', {'delay_us': 2000}), ('', {'copy_rate': 200, 'pageable_rate': 100}),
    ('micro_batches=2', {'delay_us': 500}), ("executor='threads'", {'delay_us': 500, 'sync': 1})])
def test_training_gives_the_same_bits(options, settings):
    found, locked, others = run(TRAINING.replace('OPTIONS', options), **settings)
    assert found.endswith('True') and int(found.split()[0]) >= 2 * 2 * 7
    assert (locked, others) == ('False', '0 True')
