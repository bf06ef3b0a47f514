"""Devices with too little memory: slices, and other remedies, with the result of one device.

Each test is a process on the CUDA stand-in, whose devices have as much memory as the test says.
"""
import cuda_on_cpu
import pytest
from support.standin import launched, run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

MODEL = '''
import ctypes, os
import theano, theano.tensor as T
from models import adam
from support.modes import PYTHON
from theano_mgpu.runtime import remedies
cuda = ctypes.CDLL('libcuda.so')
HOLDS = int(os.environ.get('OMPI_COMM_WORLD_RANK', '0'))
if N:
    mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(N)))
else:
    mgpu.init()  # the devices of this rank

def network():
    """Return an input, a loss, weights and outputs of a row a sample; a sample takes about 10 kB in training."""
    rng, x = np.random.RandomState(0), T.matrix('x')
    weights = [theano.shared((rng.randn(*size) / size[0] ** .5).astype('float32'))
               for size in ((32, 400), (400, 400), (400, 3))]
    h = x
    for w in weights:
        h = T.tanh(T.dot(h, w))
    return x, T.sqr(h).mean(), weights, h

def training(**options):
    x, loss, weights, _ = network()
    return mgpu.training_function([x], loss, weights, adam, name='net', **options), weights

def plain():
    """Return a step of Theano itself, on the host, and its weights."""
    x, loss, weights, _ = network()
    updates = adam(theano.grad(loss, weights), weights)
    return theano.function([x], loss, updates=list(dict(updates).items()), mode=PYTHON), weights

def batches(*sizes):
    rng = np.random.RandomState(1)
    return [rng.randn(size, 32).astype('float32') for size in sizes]

def equal(weights, others):
    return all(np.allclose(a.get_value(), b.get_value(), 1e-3, 2e-5) for a, b in zip(weights, others))

def slices(step):
    return list(step.built.splitter.slices.items())

def count_attempts():
    """Return a list that gets for each attempt that fails whether it lacked memory for samples."""
    failed, remedy = [], remedies.Remedies.for_step
    def for_step(self, lengths, error, *others):
        failed.append(error.samples is not None)
        return remedy(self, lengths, error, *others)
    remedies.Remedies.for_step = for_step
    return failed
'''

LARGER = MODEL + '''
(step, weights), (reference, others), failed = training(), plain(), count_attempts()
for batch in batches(32, 1500 * (N), 999):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
    assert len(failed) <= np.log2(len(batch)) + len(remedies.OF_SAMPLES)
    failed.clear()
print(equal(weights, others), len(slices(step)) > 0)
'''


EACH_ALLOCATES = 'gpuarray.preallocate=-1'  # each array is allocated by the driver
NO_MORE = {'nccl_memory': '1'}  # the devices' memory is for arrays alone


def lines(code, n=2, memory='12M', **settings):
    found = run(code.replace('if N:', 'if %d:' % n).replace('(N)', '(%d)' % n), n, memory=memory, **NO_MORE, **settings)
    return [line for line in found if not line.startswith('Disabling allocation cache')]  # libgpuarray says so


@pytest.mark.slow
@pytest.mark.parametrize('n,memory', [(2, '12M'), (1, '12M'), (2, '8M'), (4, '12M')])
def test_batches_of_any_size_train(n, memory):
    assert lines(LARGER, n, memory) == ['True True']


FEWEST = MODEL + '''
(step, _), size = training(), 6000
step(*batches(size))
number = step.built.splitter.slices[size,]
del step
fewer, _ = training(micro_batches=number // 2)
try:
    fewer(*batches(size))
except mgpu.ReplicaError as error:
    print(number > 2, error.out_of_memory)
'''


@pytest.mark.slow
def test_no_more_slices_than_are_needed():
    """Arrays that a failed attempt has left on a device do not count against the next one."""
    assert lines(FEWEST, memory='9M', flags=EACH_ALLOCATES) == ['True True']


NORMALISED = MODEL + '''
from theano.tensor.nnet.bn import batch_normalization_train
from theano_mgpu.devices.contexts import contexts, gpu_context

def deep():
    rng, x = np.random.RandomState(0), T.matrix('x')
    weights = [theano.shared((rng.randn(*size) / size[0] ** .5).astype('float32'))
               for size in ((32, 100), (100, 100), (100, 100), (100, 3))]
    h = x
    for w in weights:
        h = T.dot(h, w)
        n = w.get_value().shape[1]
        h = T.tanh(batch_normalization_train(h, T.ones((n,)), T.zeros((n,)), axes=(0,))[0])
    return x, T.sqr(h - x[:, :3]).mean(), weights

def peak_of(step, batch):
    peak = ctypes.c_size_t()
    cuda.cudaOnCpuPeakMemory(ctypes.byref(peak), 0)
    results = [step(batch) for _ in range(2)]
    cuda.cudaOnCpuPeakMemory(ctypes.byref(peak), 0)
    return peak.value, results

batch, = batches(2000)
x, loss, weights = deep()
step = mgpu.training_function([x], loss, weights, adam)
x, loss, others = deep()
plain = theano.function([x], loss, updates=list(dict(adam(theano.grad(loss, others), others)).items()), mode=PYTHON)
whole, results = peak_of(step, batch)
np.testing.assert_allclose(results, [plain(batch) for _ in range(2)], rtol=1e-4)
step.built.splitter.slice([len(batch)], 16)
sliced, results = peak_of(step, batch)
np.testing.assert_allclose(results, [plain(batch) for _ in range(2)], rtol=1e-4)
print(len(step.plan.stages) > 4, equal(weights, others), sliced < whole / 4)
'''


@pytest.mark.slow  # test_coupled_samples.py compares micro-batches over stages with one device
@pytest.mark.parametrize('n', [1, 2])
def test_slices_of_a_normalised_batch_wait_on_the_host(n):
    """Between the stages, only one slice is on a device. Graphs keep the memory of whole batches until it is short."""
    code = NORMALISED if n > 1 else NORMALISED.replace('weights, adam)', 'weights, adam, micro_batches=2)').replace(
        'whole, results', 'step.built.splitter.slice([2000], 1)\nwhole, results', 1)
    assert lines(code, n, '2G', flags=EACH_ALLOCATES + ',mgpu.cuda_graphs=off') == ['True True True']


ROWS = MODEL + '''
x, loss, weights, h = network()
f = mgpu.function([x], [h, loss], name='predict')
plain_function = theano.function([x], [h, loss], mode=PYTHON)
batch, = batches(8000)
for found, expected in zip(f(batch), plain_function(batch)):
    np.testing.assert_allclose(found, expected, 1e-4, 1e-6)
print(len(slices(f)))
'''


@pytest.mark.slow
def test_rows_of_a_batch_that_does_not_fit_are_computed_in_slices():
    assert lines(ROWS) == ['1']


GIVES_UP = MODEL + '''
import traceback
x, w = T.matrix('x'), theano.shared(np.ones((32, 1), 'float32'), 'w')
wide = T.tanh(T.repeat(T.dot(x, w), 1 << 22, axis=1))  # a sample takes 16 MB
step = mgpu.training_function([x], wide.mean(), [w], adam, name='wide', **OPTIONS)
try:
    step(*batches(8))
except mgpu.ReplicaError as error:
    print(error.out_of_memory, str(traceback.format_exception_only(error)[1:]))
print((w.get_value() == 1).all(), slices(step))
'''


@pytest.mark.slow_with('options1-ways1')
@pytest.mark.parametrize('options,ways', [
    ({}, ['whole', '2 slices', '4 slices', '4 slices, update_on=sharded', '4 slices, update_on=host']),
    ({'micro_batches': 1}, []), pytest.param({'update_on': 'device'}, ['whole', '2 slices', '4 slices'],
                                             marks=pytest.mark.slow)])
def test_an_error_if_nothing_helps(options, ways):
    """It names the ways that were tried; a way that was asked for stays."""
    error, state = lines(GIVES_UP.replace('OPTIONS', repr(options)))
    assert error == 'True [%s]' % (
        ways and repr('these ways were tried (mgpu.micro_batches=auto): %s\n' % '; '.join(ways)) or '')
    assert state == ('True [((8,), 4)]' if ways else 'True []')


STATE = MODEL.replace('((32, 400), (400, 400), (400, 3))', '((32, 200), *6 * [(200, 200)], (200, 3))') + '''
from pygpu import gpuarray
from theano_mgpu.devices.contexts import contexts, gpu_context
(step, weights), (reference, others) = training(), plain()
for number, batch in enumerate(batches(64, 64, 7, 64)):
    if number == 1:  # another program takes memory
        held = [gpuarray.zeros((1 << 17,), 'int8', context=context) for context in map(gpu_context, contexts())
                for _ in range((context.free_gmem - (LEFT)) >> 17)]
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
state = [each for each in step.updated if each.variable not in step.params]
print(step.options.updates_on(step.contexts)[0], equal(weights, others), len(slices(step)),
      'a device had too little memory' in str(step.plan))
'''


@pytest.mark.slow_with('1-5 << 18-host True 0 True')
@pytest.mark.parametrize('n,left,expected', [(2, '3 << 20', 'sharded True 0 True'), pytest.param(
    2, '5 << 18', 'host True 0 True', marks=pytest.mark.slow), (1, '5 << 18', 'host True 0 True')])
def test_state_that_does_not_fit_is_divided_or_kept_on_the_host(n, left, expected):
    """A step needs 1 MB for each of: parameters, two moments, and new values of all three."""
    assert lines(STATE.replace('LEFT', left), n, flags=EACH_ALLOCATES) == [expected]


FULL = STATE[:STATE.index('(step, weights)')] + '''
(step, weights), (reference, others), failed = training(), plain(), count_attempts()
for batch in batches(64, 64, 7):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
print(step.options.updates_on(step.contexts)[0], equal(weights, others), slices(step), failed[0], len(failed) < 3)
'''


@pytest.mark.slow
def test_a_step_without_room_for_new_values_is_not_sliced():
    """Memory ends while gradients are computed: slices of a sample each would help little, and stay for ever."""
    assert lines(FULL, 2, '3700K', flags=EACH_ALLOCATES) == ['host True [] True True']


SPREAD = STATE[:STATE.index('(step, weights)')] + '''
(step, weights), (reference, others) = training(), plain()
for batch in batches(64, 64, 7, 64):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
x, h = T.matrix('x'), None
for w in weights:
    h = T.tanh(T.dot(x if h is None else h, w))
predict, expected = mgpu.function([x], h), theano.function([x], theano.clone(h, dict(zip(weights, others))))
np.testing.assert_allclose(predict(batch), expected(batch), 1e-3, 1e-4)
print(equal(weights, others), step.mesh.places, predict.mesh.places, [w.get_value().nbytes for w in weights])
'''


@pytest.mark.slow
def test_parameters_that_do_not_fit_on_one_device_are_spread():
    """Two devices of 2.2 MB have room for the parameters and gradients (1 MB each), and a new value, together."""
    line, = lines(SPREAD, memory='2200K', flags=EACH_ALLOCATES)
    assert line.startswith("True ['dev0', 'dev1'] ['dev0', 'dev1']"), line


SLICED = MODEL + '''
import re
from pygpu import gpuarray
from theano_mgpu.devices.contexts import contexts, gpu_context
from theano_mgpu.runtime.replicas.replicated import replicated
rng = np.random.RandomState(2 + HOLDS)  # every rank has the data of rank 0

class Sliced:
    """The network, its step of Theano itself or over contexts, and its data sets of `length` rows of 132 bytes."""

    def __init__(self, make, length):
        x, _, self.weights, h = network()
        y, self.index = T.ivector('y'), T.lscalar('index')
        self.data, self.labels = theano.shared(np.zeros((0, 32), 'float32'), 'data'), theano.shared(
            np.zeros(0, 'float32'), 'labels')
        self.loss = T.nnet.categorical_crossentropy(T.nnet.softmax(h), y).mean()
        rows = slice(self.index * 500, (self.index + 1) * 500)
        self.givens = {x: self.data[rows], y: T.cast(self.labels, 'int32')[rows]}
        self.give(*rows_of_data(length))
        self.step = make(self)

    def give(self, data, labels):
        self.data.set_value(data, borrow=True), self.labels.set_value(labels, borrow=True)

def rows_of_data(length):
    return rng.randn(length, 32).astype('float32'), rng.randint(0, 3, length).astype('float32')

def over_contexts(net):
    return mgpu.training_function([net.index], net.loss, net.weights, adam, givens=net.givens, name='net')

def of_theano(net):
    return theano.function([net.index], net.loss, givens=net.givens, mode=PYTHON,
                           updates=list(dict(adam(theano.grad(net.loss, net.weights), net.weights)).items()))

def pair(length):
    ours = Sliced(over_contexts, length)
    rng.seed(2)
    return ours, Sliced(of_theano, length)

def same_losses(ours, theirs, numbers=(3, 1, -1, 0, 2, 3)):
    last = (len(theirs.data.get_value(borrow=True)) - 1) // 500
    for number in numbers:
        number = last if number < 0 else number
        np.testing.assert_allclose(ours.step(number), theirs.step(number), rtol=1e-4)

def on_host(ours):
    return re.search('data sets +on the host', str(ours.step.plan)) is not None
'''

LARGE = SLICED + '''
ours, theirs = pair(109777)  # 14 MB
for sign in (1, -1):
    same_losses(ours, theirs)
    data = sign * 2 * theirs.data.get_value(), 2 - theirs.labels.get_value()
    for each in (ours, theirs):
        each.give(*data)
for number, loss in enumerate(ours.step.over([(number,) for number in (0, 1, 139, 2)])):  # the next batch is known
    np.testing.assert_allclose(loss, theirs.step((0, 1, 139, 2)[number]), rtol=1e-4)
    ours.give(*data), theirs.give(*data)
    data = -data[0], data[1]
for each in (ours, theirs):
    each.give(*data)
data[0][:] += 1  # in place
same_losses(ours, theirs)
print(on_host(ours), equal(ours.weights, theirs.weights), len(slices(ours.step)),
      ours.step.options.updates_on(contexts())[0])
'''


@pytest.mark.slow_with('2')
@pytest.mark.parametrize('n', [1, 2])
def test_data_sets_that_do_not_fit_stay_on_the_host(n):
    """A batch is sent in parts; a value that is set, or edited in place, counts from the next step on."""
    assert lines(LARGE, n, flags=EACH_ALLOCATES) == ['True True 0 device']


GROWS = SLICED + '''
ours, theirs = pair(1777)
same_losses(ours, theirs)
print(on_host(ours), contexts()[0] in replicated(ours.data).current().values())
data = rows_of_data(69777)
for each in (ours, theirs):
    each.give(*data)
same_losses(ours, theirs)
print(on_host(ours), equal(ours.weights, theirs.weights))
'''


@pytest.mark.slow
@pytest.mark.parametrize('n', [1, 2])
def test_a_data_set_is_on_the_devices_as_long_as_it_fits(n):
    assert lines(GROWS, n, flags=EACH_ALLOCATES) == ['False True', 'True True']


SHARED = SLICED + '''
context = gpu_context(contexts()[1])
held = [gpuarray.zeros((1 << 20,), 'int8', context=context) for _ in range((context.free_gmem >> 20) - 8)]
ours, theirs = pair(69777)
test = mgpu.function([ours.index], ours.loss, givens=ours.givens, name='test')
for number in (0, 139):
    test(number), ours.step(number)
print(on_host(ours), bool(test.built.data_sets),
      sum(copy.container.storage[0].size for copy in replicated(ours.data).copies.values()))
'''


@pytest.mark.slow
def test_functions_over_a_data_set_that_one_device_has_no_room_for():
    """The copy that one of them has made, before another device was found too small, is freed."""
    assert lines(SHARED, 2, memory='14M', flags=EACH_ALLOCATES) == ['True True 0']


SMALL_DATA = SLICED + '''
ours, theirs = pair(1777)  # 0.2 MB; the network has 0.7 MB
same_losses(ours, theirs)
held = [gpuarray.zeros((1 << 17,), 'int8', context=context) for context in map(gpu_context, contexts())
        for _ in range((context.free_gmem - (7 << 18)) >> 17)]
same_losses(ours, theirs)
print(on_host(ours), ours.step.options.updates_on(ours.step.contexts)[0], equal(ours.weights, theirs.weights))
'''


@pytest.mark.slow
def test_a_small_data_set_leaves_the_device_last():
    assert lines(SMALL_DATA, 1, flags=EACH_ALLOCATES) == ['False host True']


OTHER_DATA = '''
ours.data.set_value(data[0] + HOLDS)
try:
    ours.step(0)
except mgpu.RankError as error:
    print('set variables to different values' in str(error))
'''


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('devices', [2, 4])
def test_data_sets_of_ranks_do_not_fit(devices, tmp_path):
    code = (LARGE + OTHER_DATA).replace('if N:', 'if 0:').replace('(N)', '(0)')
    assert launched(2, code, tmp_path, devices, memory='12M', flags=EACH_ALLOCATES, **NO_MORE)[-2:] == [
        'True True 0 device', 'True']


INJECTED = MODEL + '''
from theano_mgpu.runtime.remedies import Remedies
(step, weights), (reference, others) = training(OPTIONS), plain()
remedy, failed = Remedies.for_step, []
def cancelled(self, lengths, error, *others):
    cuda.cudaOnCpuFailAllocAfter(1, ctypes.c_long(-1))
    failed.append('update' if getattr(error, 'samples', None) is None else 'samples')
    return remedy(self, lengths, error, *others)
Remedies.for_step = cancelled
batch, = batches(40)
np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
number = 0
while len(failed) == number and number < 200:
    step.built.splitter.slices.clear()
    cuda.cudaOnCpuFailAllocAfter(1, ctypes.c_long(number))
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
    number += 1
cuda.cudaOnCpuFailAllocAfter(1, ctypes.c_long(-1))
print(equal(weights, others), number, sorted(set(failed)))
'''


@pytest.mark.slow
@pytest.mark.parametrize('options', ["update_on='device'", "update_on='sharded'", "update_on='host'"])
def test_a_step_without_memory_for_any_of_its_arrays_is_repeated(options):
    """The first allocation of a step fails, then the second, until a step makes fewer."""
    same, = lines(INJECTED.replace('OPTIONS', options), memory='2G', flags=EACH_ALLOCATES)
    assert same.startswith('True') and 15 < int(same.split()[1]) < 200 and "'samples'" in same, same


RANKS = MODEL + '''
(step, weights), (reference, others) = training(), plain()
rank = step.ranks.rank
from pygpu import gpuarray
from theano_mgpu.devices.contexts import contexts, gpu_context
held = [gpuarray.zeros((3 << 20,), 'int8', context=gpu_context(context)) for context in contexts() if rank == 1]
for batch in batches(100, 3000, 6000, 37, 6000):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
print(equal(weights, others), len(slices(step)) > 0)
'''


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('devices', [2, 4])
def test_only_one_of_the_ranks_is_short_of_memory(devices, tmp_path):
    assert launched(2, RANKS.replace('if N:', 'if 0:').replace('(N)', '(0)'), tmp_path, devices,
                    memory='12M') == ['True True']


KERAS = MODEL.replace("import theano, theano.tensor as T", "import keras, theano, theano.tensor as T") + """
from keras.layers import BatchNormalization, Dense, Dropout
from keras.models import Sequential, clone_model
from theano_mgpu.keras import multi_gpu_model
model = Sequential([Dense(400, activation='tanh', input_dim=32), Dense(400, activation='tanh'), Dense(3)])
alone = clone_model(model)
alone.set_weights(model.get_weights())
parallel, results = multi_gpu_model(model, gpus=2), []
x, y = batches(9000)[0], np.zeros((9000, 3), 'float32')
for each in (parallel, alone):
    each.compile('adam', 'mse', metrics=['mae'])
    history = each.fit(x, y, batch_size=4000, epochs=2, validation_data=(x, y), shuffle=False, verbose=0).history
    results.append([np.array(sorted(history.items()), dtype=object)[:, 1].tolist(), each.predict(x, batch_size=9000)])
for a, b in zip(results[0], results[1]):
    np.testing.assert_allclose(a, b, 1e-3, 1e-5)
for a, b in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(a, b, 1e-3, 1e-4)
print(parallel.train_function.function.built.splitter.slices)
"""


@pytest.mark.slow
def test_keras_fits_evaluates_and_predicts_batches_that_do_not_fit():
    """Plain Keras computes on the host."""
    slices, = lines(KERAS)
    assert slices.startswith('{(4000,): ')


DOUBLING = MODEL + '''
rng = np.random.RandomState(0)
start = rng.randn(32, 1).astype('float32') / 6

def wide():
    """Return an input, a loss and weights; a sample takes about 0.8 MB in training."""
    x, w, v = T.matrix('x'), theano.shared(start), theano.shared(np.linspace(-1, 1, 100000).astype('float32'))
    return x, T.sqr(T.tanh(T.dot(x, w)[:, 0].dimshuffle(0, 'x') * v)).mean(), [w]

(x, loss, weights), (y, other, others) = wide(), wide()
step = mgpu.training_function([x], loss, weights, adam, name='wide')
reference = theano.function([y], other, updates=list(dict(adam(theano.grad(other, others), others)).items()),
                            mode=PYTHON)
sizes = 32, 64, 128, 256
for batch in batches(*sizes):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
splitter = step.built.splitter
print(equal(weights, others), [splitter.slices[size,] == splitter.shares.most_slices([size]) for size in sizes])
'''


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('n,ranks', [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_batches_of_any_size_train_where_a_device_has_room_for_one_sample(n, ranks, tmp_path):
    """A variable and a slice of one sample take 0.8 MB, a slice of two samples 1.2 MB."""
    memory = '1100K'
    line, = lines(DOUBLING, n, memory, flags=EACH_ALLOCATES) if ranks == 1 else \
        [line for line in launched(ranks, DOUBLING.replace('if N:', 'if 0:').replace('(N)', '(0)'), tmp_path, n,
                                   EACH_ALLOCATES, memory=memory, **NO_MORE) if not line.startswith('Disabling')]
    assert line == 'True [True, True, True, True]'


AHEAD = MODEL + '''
(step, weights), (reference, others), failed = training(), plain(), count_attempts()
many = batches(*[6000] * 5)
for loss, batch in zip(step.over(many), many):
    np.testing.assert_allclose(loss, reference(batch), rtol=1e-4)
print(equal(weights, others), 0 < len(failed) < 4)
'''


@pytest.mark.slow
@pytest.mark.mpi
def test_batches_that_are_sent_ahead_are_sliced_alike_on_several_ranks(tmp_path):
    """Each later batch of the length needs one attempt."""
    code = AHEAD.replace('if N:', 'if 0:').replace('(N)', '(0)')
    found = launched(2, code, tmp_path, 2, EACH_ALLOCATES, memory='12M', **NO_MORE)
    assert [line for line in found if not line.startswith('Disabling')] == ['True True']


ROWS_OF_STATE = MODEL + '''
def recurrent():
    """Return an input, a loss, weights and new values of a state with a row a sample."""
    x, loss, weights, h = network()
    state = theano.shared(np.zeros((3000, 3), 'float32'))
    return x, loss + T.sqr(h + state).mean(), weights, {state: T.tanh(h + state)}
(x, loss, weights, state), (y, other, others, old) = recurrent(), recurrent()
step = mgpu.training_function([x], loss, weights, adam, batch_updates=state)
reference = theano.function([y], other, updates=[*dict(adam(theano.grad(other, others), others)).items(), *old.items()],
                            mode=PYTHON)
for batch in batches(3000, 3000):
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-4)
print(equal(weights, others), equal(state, old), len(slices(step)) > 0)
'''


@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_states_with_a_row_a_sample_go_on_after_a_remedy(n):
    """The graph of one device is divided only once memory is short."""
    assert lines(ROWS_OF_STATE, n) == ['True True True']
