"""The estimate of the memory of a step, against the bytes that the CUDA stand-in counts; and the shapes behind it."""
import json
import os
import subprocess
import sys

import theano_mgpu as mgpu
from theano_mgpu.plan.explain import largest_text
from theano_mgpu.runtime.memory.arrays import Memory
from theano_mgpu.runtime.memory.function import DryFunction
from theano_mgpu.runtime.memory.shapes import UnknownShape
from theano_mgpu.runtime.memory.step import last_within

import cuda_on_cpu
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.standin import run

on_stand_in = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                              reason=cuda_on_cpu.unavailable() or '')]
BENCHMARK = os.path.join(os.path.dirname(__file__), '..', '..', 'benchmarks', 'memory.py')

PROGRAM = '''
import gc
import theano, theano.tensor as T
from models import adam, sgd
from support.device_memory import peaks
mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(N)))

def wide(updates=adam, **options):
    """Return a training step whose memory is its values, and its parameters."""
    rng, x, h = np.random.RandomState(0), T.matrix('x'), None
    weights = [theano.shared((rng.randn(400, 400) / 20).astype('float32')) for _ in range(3)]
    for w in weights:
        h = T.tanh(T.dot(x if h is None else h, w))
    return mgpu.training_function([x], T.sqr(h).mean(), weights, updates, name='net', **options)

def dropped(**options):
    """Return a training step with dropout: its random numbers are drawn for the whole batch."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    rng, draws, x, h = np.random.RandomState(0), MRG_RandomStreams(1), T.matrix('x'), None
    weights = [theano.shared((rng.randn(400, 400) / 20).astype('float32')) for _ in range(3)]
    for w in weights:
        h = T.tanh(T.dot(x if h is None else h, w))
        h = h * draws.binomial(size=h.shape, p=.5, dtype='float32')
    return mgpu.training_function([x], T.sqr(h).mean(), weights, sgd, name='dropout', **options)

def viewed():
    """Return a function that looks at its input in several ways, and works in place."""
    x = T.tensor3('x')
    y = T.exp(x)
    for i in range(3):
        y = T.sqr(y.dimshuffle(0, 2, 1).reshape((x.shape[0], 20, 20)) - i)[:, ::-1].dimshuffle(0, 1, 2)
    return mgpu.function([x], T.exp(y).sum(axis=(1, 2)), name='views')

def looped():
    """Return a training step with a loop over time."""
    x, w = T.tensor3('x'), theano.shared(np.eye(40, dtype='float32'))
    h, _ = theano.scan(lambda part, before: T.tanh(part + T.dot(before, w)), x.dimshuffle(1, 0, 2),
                       T.zeros((x.shape[0], 40), 'float32'))
    return mgpu.training_function([x], T.sqr(h[-1]).mean(), [w], sgd, name='loop')

def lstm(units=64, **options):
    """Return a training step with an LSTM, whose loop keeps what its gradient needs."""
    rng, x = np.random.RandomState(0), T.tensor3('x')
    w, u = [theano.shared((rng.randn(size, 4 * units) / 10).astype('float32')) for size in (40, units)]
    def step(part, output, cell):
        gates = part + T.dot(output, u)
        i, f, o = [T.nnet.sigmoid(gates[:, k * units:(k + 1) * units]) for k in range(3)]
        cell = f * cell + i * T.tanh(gates[:, 3 * units:])
        return o * T.tanh(cell), cell
    zero = T.zeros((x.shape[0], units), 'float32')
    (outputs, _), _ = theano.scan(step, T.dot(x, w).dimshuffle(1, 0, 2), [zero, zero])
    return mgpu.training_function([x], T.sqr(outputs[-1]).mean(), [w, u], sgd, name='lstm', **options)

def ratios(step, *shape):
    """Return the estimate of each device's peak as a part of it."""
    x = np.random.RandomState(1).rand(*shape).astype('float32')
    for _ in range(2):
        step(x)
    gc.collect()
    peaks(N)
    for _ in range(3):
        step(x)
    counted = peaks(N)
    for variable in step.executable.variables:
        variable.evict()  # a freed copy has the shape of its variable
    return [step.built.dry_step.peaks(len(x))[context] / peak for context, peak in zip(step.mesh.contexts, counted)]
'''


def ratios(call, n=2, flags='', **settings):
    """Return the ratios of the estimates and the peaks on the stand-in."""
    printed = run('N = %d\n%sprint(__import__("json").dumps(%s))' % (n, PROGRAM, call), n,
                  flags='gpuarray.preallocate=-1,' + flags, **settings)
    return json.loads(printed[-1])


def near(found):
    assert found
    assert all(0.85 < ratio < 1.15 for ratio in found), found


class TestPeaks:
    pytestmark = on_stand_in

    @pytest.mark.parametrize('call,flags', [
        # The peak is in the update; in the backward pass of the last slice; between views; in the backward pass.
        ('ratios(wide(), 16, 400)', ''), ('ratios(wide(micro_batches=4), 8000, 400)', ''),
        pytest.param('ratios(viewed(), 2000, 20, 20)', '', marks=pytest.mark.slow),
        pytest.param('ratios(wide(), 4000, 400)', '', marks=pytest.mark.slow),
        pytest.param('ratios(wide(), 4000, 400)', 'mgpu.collectives=host', marks=pytest.mark.slow),
        pytest.param('ratios(wide(update_on="sharded"), 16, 400)', '', marks=pytest.mark.slow),
        pytest.param('ratios(wide(), 4000, 400)', 'allow_gc=False', marks=pytest.mark.slow),
        pytest.param('ratios(wide(), 16, 400)', 'mgpu.logical_shards=4', marks=pytest.mark.slow),
        pytest.param('ratios(wide(), 16, 400)', 'mgpu.logical_shards=4,mgpu.collectives=host', marks=pytest.mark.slow),
        pytest.param('ratios(looped(), 800, 30, 40)', '', marks=pytest.mark.slow),
        pytest.param('ratios(lstm(), 200, 30, 40)', '', marks=pytest.mark.slow),
        pytest.param('ratios(lstm(micro_batches=3), 200, 30, 40)', '', marks=pytest.mark.slow),
        pytest.param('ratios(dropped(), 1000, 400)', 'mgpu.logical_shards=6', marks=pytest.mark.slow)])
    def test_the_estimate_is_near_the_peak(self, call, flags):
        near(ratios(call, flags=flags))

    def test_slices_of_unequal_sizes(self):
        """A buffer that the next slice replaces by a smaller one stays as long as its slice: 7 % of the peak."""
        found = ratios('ratios(wide(micro_batches=3), 1000, 400)')
        assert all(0.97 < ratio < 1.02 for ratio in found), found

    @pytest.mark.slow
    @pytest.mark.parametrize('options', ['', 'micro_batches=3'])
    def test_random_numbers_of_the_whole_batch(self, options):
        """Slices share them: they are drawn once, and stay until the last slice, as 0.29 of the peak."""
        found = ratios('ratios(dropped(%s), 1000, 400)' % options)
        assert all(0.97 < ratio < 1.02 for ratio in found), found

    @pytest.mark.slow
    def test_parts_of_logical_shards_on_other_devices(self):
        """Each of four devices has the gradients of all: the peak is in their addition."""
        near(ratios('ratios(wide(sgd), 16, 400)', n=4, flags='mgpu.logical_shards=4'))

    @pytest.mark.slow
    def test_one_device(self):
        near(ratios('ratios(wide(), 4000, 400)', n=1))


LARGEST = '''
step = wide(OPTIONS)
x = np.random.RandomState(1).rand(20000, 400).astype('float32')
step(x[:100])
estimate = step.built.dry_step.estimate()
fits = estimate.largest_batch
for n in (int(.97 * fits), int(1.15 * fits)):
    try:
        for _ in range(3):
            step(x[:n])
        print('fits')
    except mgpu.ReplicaError as error:
        print('too large' if error.out_of_memory else error)
print(estimate.slice)
'''


class TestLargestBatch:
    pytestmark = on_stand_in

    def test_it_fits_and_a_larger_one_does_not(self):
        code = 'N = 2\n' + PROGRAM + LARGEST.replace('OPTIONS', 'micro_batches=1')
        assert run(code, 2, flags='gpuarray.preallocate=-1', memory='32M')[-3:] == ['fits', 'too large', 'None']

    @pytest.mark.slow
    def test_larger_ones_are_computed_in_slices_of_the_size_that_fits(self):
        code = 'N = 2\n' + PROGRAM + LARGEST.replace('OPTIONS', '') + '''
slices, = step.built.splitter.slices.values()
print(n / 2 / slices <= estimate.slice)
'''
        *fit, part, is_small = run(code, 2, flags='gpuarray.preallocate=-1', memory='32M')[-4:]
        assert fit == ['fits', 'fits']
        assert int(part) > 100
        assert is_small == 'True'


EXPLAINED = '''
import numpy as np, theano, theano.tensor as T
x = T.matrix('x')
f = theano.function([x], T.exp(x).sum(axis=1))
g = theano.function([x], x[T.nonzero(x[:, 0] > .5)[0]].sum())
for function in (f, g):
    for _ in range(2):
        function(np.ones((64, 1000), theano.config.floatX))
'''


@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
def test_plans_show_the_peak_and_the_largest_batch(tmp_path):
    script, written = tmp_path / 'script.py', tmp_path / 'plans.json'
    script.write_text(EXPLAINED)
    env = dict(cuda_on_cpu.environment(2, memory='64M'), THEANO_FLAGS='floatX=float32,contexts=dev0->cuda0;dev1->cuda1')
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', '--always', '--explain', '--json', str(written),
                           str(script)], env=env, stderr=subprocess.PIPE, text=True, check=True)
    first = json.loads(written.read_text())[0]
    peaks = [row['peak'] for row in first['memory'] if row['peak'] is not None]
    # Each device has the memory of two batches of inputs, one of values, and the sums.
    assert [round(peak / (32 * 1000 * 4)) for peak in peaks] == [3, 3]
    assert first['memory'][0]['largest_batch'] == pytest.approx((64 << 20) / (3 * 1000 * 4 / 2), rel=.05)
    assert 'Batches of up to %d samples fit at once' % first['largest_batch'] in done.stderr
    assert 'LARGEST BATCH' in done.stderr


# --- without a device

def test_last_within_takes_few_steps():
    """The excess of a batch is about a line."""
    asked = []

    def excess(n):
        asked.append(n)
        return 7 * n + (n // 5) % 3 - 70000
    found = last_within(excess, 1 << 20)
    assert excess(found) <= 0 < excess(found + 1)
    assert len(asked) < 25


def ran(function, *given):
    """Return the memory and the results of a dry run: of arrays of these shapes, or of known numbers."""
    memory, around = Memory(), Memory()
    given = [around.array(each, theano.config.floatX) if isinstance(each, tuple) else np.array(each) for each in given]
    return memory, DryFunction(function, 'cpu').run(memory, memory, given, {})


def test_views_take_no_memory():
    memory = Memory()
    array = memory.array((6, 4), 'float32')
    rows = array[2:5]
    assert memory.now == 96 and (rows.shape, rows.nbytes) == ((3, 4), 48)
    del array
    assert memory.now == 96
    del rows
    assert (memory.now, memory.peak) == (0, 96)


x, n = T.matrix('x'), T.lscalar('n')
CASES = {
    'elementwise': T.exp(x) + x[0],
    'part': x[1:n, ::2],
    'reshaped': T.exp(x).reshape((x.shape[1], 2, -1)),
    'joined': T.concatenate([x, T.sqr(x)[:2]], axis=0),
    'shape of a value': T.zeros((T.dot(x, x.T).shape[0] + n,)),
    'branch': theano.ifelse.ifelse(n > 2, T.exp(x), T.tanh(x)),
    'size of a branch': T.zeros((theano.ifelse.ifelse(n > 2, x.shape[0], x.shape[1]),)),
    'arange': T.arange(x.shape[0] * 2) * T.ones((3, 1)),
    'loop': theano.scan(lambda row: T.tanh(row) * 2, x)[0],
    'drawn': theano.sandbox.rng_mrg.MRG_RandomStreams(1).uniform(x.shape)}


@pytest.mark.parametrize('name', CASES)
def test_shapes_follow_from_the_inputs(name):
    """They are as in a call of the function, for several sizes."""
    function = theano.function([x, n], CASES[name], on_unused_input='ignore')
    for rows, number in ((4, 3), (6, 2)):
        value = np.ones((rows, 8), theano.config.floatX)
        shared = [each.storage[0] for each in function.input_storage[2:]]
        _, (result, *_) = ran(function, value.shape, number, *shared)
        assert tuple(result.shape) == function(value, number).shape


def test_a_shape_that_depends_on_values_is_not_known():
    with pytest.raises(UnknownShape):
        ran(theano.function([x], T.exp(x[T.nonzero(x[:, 0])[0]])), (4, 8))


def test_values_are_freed_after_their_last_reader():
    """Results in place take no memory; a chain of products needs two matrices at a time."""
    y = x
    for _ in range(5):
        y = T.dot(y, y)
    memory, (result,) = ran(theano.function([x], T.exp(y), mode=theano.Mode('cvm', 'fast_run')), (50, 50))
    size = 50 * 50 * np.dtype(theano.config.floatX).itemsize
    assert result.nbytes == size
    assert size * 2 <= memory.peak < size * 2.1


SIZE = 4 * 6 * 5 * np.dtype(theano.config.floatX).itemsize
y = T.tensor3('y')
VIEWS = {  # functions of exp(y), with 4 rows of shape (6, 5), and the number of arrays of its size in the end
    'a view': (lambda z: z.dimshuffle(1, 0, 2), 1), 'rows': (lambda z: z[1:3], 1),
    'a view in one piece': (lambda z: z.reshape((24, 5)), 1), 'an axis of length 1': (lambda z: z.dimshuffle(
        0, 'x', 1, 2).reshape((4, 30)), 1), 'part': (lambda z: z[1].reshape((30,)), 1),
    'a view in pieces': (lambda z: z.dimshuffle(1, 0, 2).reshape((24, 5)), 2),
    'backwards': (lambda z: z[::-1].reshape((24, 5)), 2)}


@pytest.mark.parametrize('name', VIEWS)
def test_a_view_is_copied_if_its_elements_do_not_lie_one_after_the_other(name):
    of, n = VIEWS[name]
    memory, _ = ran(theano.function([y], of(T.exp(y)), mode=theano.Mode('cvm', None)), (4, 6, 5))
    assert n * SIZE <= memory.peak < (n + .2) * SIZE


def test_a_branch_that_is_not_taken_takes_no_memory():
    products = T.dot(x, x.T)
    for _ in range(3):
        products = T.dot(products, products.T)
    function = theano.function([x, n], theano.ifelse.ifelse(n, products, x.T), on_unused_input='ignore')
    peaks = [ran(function, (90, 2), number)[0].peak for number in (0, 1)]
    assert peaks[0] < 1000 + 90 * 2 * 8 < 50000 < peaks[1]


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_the_zoo_is_within_15_percent(tmp_path):
    if cuda_on_cpu.unavailable():
        pytest.skip(cuda_on_cpu.unavailable())
    path = tmp_path / 'memory.json'
    subprocess.run([sys.executable, BENCHMARK, '--json', str(path)], check=True, stdout=subprocess.PIPE)
    rows = json.loads(path.read_text())
    assert len({row['model'] for row in rows}) >= 10
    near([row['estimate'] / row['peak'] for row in rows])


def test_without_a_device_no_batch_is_estimated(contexts):
    contexts('cpu', 2)
    f = mgpu.function([x], T.exp(x).sum())
    assert f.built.dry_step.estimate() is None
    f(np.ones((4, 3), theano.config.floatX))
    estimate, size = f.built.dry_step.estimate(), np.dtype(theano.config.floatX).itemsize
    assert not estimate.peaks and not estimate.largest and largest_text(estimate, True) == ''
    # The batch, and the values of a replica with half of it.
    assert estimate.sizes[f.arguments.inputs[0]] == 2 * 3 * size and estimate.host >= 4 * 3 * size
