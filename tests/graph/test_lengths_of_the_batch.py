"""Wrong numbers since a part of the batch was asked for a length, a bound or a single row of the whole batch."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.configparser import change_flags
from theano.ifelse import ifelse

pytestmark = pytest.mark.verified
x, t, bounds, flag, i = T.dmatrix('x'), T.lvector('t'), T.lvector('bounds'), T.lscalar('flag'), T.lscalar('i')
MODE = theano.compile.get_mode('FAST_COMPILE').excluding('constant_folding', 'topo_constant_folding')


def shared(*shape):
    return theano.shared(np.random.RandomState(sum(shape)).rand(*shape), 'v')


def probabilities():
    p = T.nnet.sigmoid(T.dot(x, shared(3, 3)))
    return p / p.sum(axis=1, keepdims=True)


def labels(n):
    return theano.shared(np.arange(n) % 3, 'labels')


def state_of_samples():
    """Return a function with a state of samples that reads and writes the first rows."""
    h, n = shared(12, 3), x.shape[0]
    return [x], [h[:n] * x, h.sum()], [(h, T.set_subtensor(h[:n], T.tanh(x)))]


def slices_of_a_data_set():
    """Return a function of mini-batches of a data set beside another variable that is as long as each."""
    batch, positions = shared(20, 3)[i * 4:(i + 1) * 4], shared(12)
    return [i], [positions[:batch.shape[0]] * batch[:, 0], positions[:batch.shape[0]].sum()], []


# {name: (function that returns inputs, outputs and updates, arguments of some calls)}
CASES = {
    'sum of the first positions': (lambda: ([x], shared(12)[:x.shape[0]].sum() + x.sum(), []), [(6,), (4,), (3,)]),
    'first positions': (lambda: ([x], shared(12)[:x.shape[0]] * x.sum(), []), [(6,), (3,)]),
    'positions beside samples': (lambda: ([x], x[:, 0] + shared(12)[:x.shape[0]], []), [(6,), (3,), (2,)]),
    'positions from the second on': (lambda: ([x], x[:, 0] + shared(12)[1:x.shape[0] + 1], []), [(6,), (3,)]),
    'gradient of positions': (lambda: ([x], T.grad(T.sqr(v[:x.shape[0]]).sum() + x.mean(), v)
                                       if (v := shared(12)) else None, []), [(6,)]),
    'bounds in a vector': (lambda: ([x, bounds], x.sum(axis=1) * shared(12)[bounds[0]:bounds[1]], []),
                           [(2, np.array([3, 5]))]),
    'state of samples': (state_of_samples, [(6,), (4,), (5,)]),
    'slices of a data set': (slices_of_a_data_set, [(0,), (3,), (4,)]),
    'labels of two batches': (lambda: ([x], T.nnet.categorical_crossentropy(probabilities(), labels(8)), []), [(4,)]),
    'labels twice': (lambda: ([x, t], T.nnet.categorical_crossentropy(probabilities(), T.repeat(t, 2)), []),
                     [(4, np.array([0, 1, 2, 1])), (2, np.array([0, 1]))]),
    'branch of one row': (lambda: ([x, flag], ifelse(flag, x, shared(1, 3)).sum(axis=0), []), [(6, 1), (6, 0)]),
    'branch of a mean': (lambda: ([x, flag], ifelse(flag, x, T.unbroadcast(x.mean(axis=0, keepdims=True), 0)), []),
                         [(6, 1), (6, 0)]),
    'branch of twice as many': (lambda: ([x, flag], T.concatenate(
        [ifelse(flag, x, T.repeat(x, 2, axis=0)), x])[1:], []), [(3, 1), (3, 0)]),
    'branch of twice as many, joined': (lambda: ([x, flag], T.concatenate([ifelse(flag, x, T.repeat(x, 2, axis=0)), x]),
                                                 []), [(4, 1), (4, 0)]),
    'branch of two batches': (lambda: ([x, flag], ifelse(flag, x, shared(12, 3)).sum(axis=0), []), [(6, 1), (6, 0)]),
    'more rows than samples': (lambda: ([x], T.alloc(x, 6, 3), []), [(6,), (3,), (2,)]),
    'filled with twice as many rows': (lambda: ([x], T.alloc(x, x.shape[0] * 2, 3), []), [(2,), (3,), (1,)]),
    'one sample alone': (lambda: ([x], T.addbroadcast(x, 0) * 2, []), [(2,), (3,), (1,)]),
    'one sample for all': (lambda: ([x], T.addbroadcast(x, 0) + shared(4, 3), []), [(1,), (2,), (3,)]),
    'one row joined': (lambda: ([x], T.concatenate([x, shared(1, 2)], axis=1), []), [(1,), (2,), (4,)]),
    'more labels than samples': (lambda: ([x], x[T.arange(x.shape[0]), labels(4)], []), [(4,), (2,)]),
    'labels twice as places': (lambda: ([x, t], x[T.arange(x.shape[0]), T.repeat(t, 2)], []),
                               [(2, np.array([0, 1])), (1, np.array([2]))]),
    'written twice': (lambda: ([x], T.inc_subtensor(T.repeat(x, 2, axis=0)[:, 0], x[:, 1]), []), [(2,), (3,), (1,)]),
    'written into a block of twice as many': (lambda: ([x], T.set_subtensor(T.concatenate(
        [T.repeat(x, 2, axis=0)] * 2)[:2 * x.shape[0]], x), []), [(2,), (3,), (1,)]),
    'loop over two batches': (lambda: ([x], theano.map(lambda row, k: row.sum() * k, [x, shared(8)])[0], []),
                              [(4,), (2,)]),
    'loop from samples twice': (lambda: ([x, t], theano.scan(lambda column, h: T.tanh(column), [x.T],
                                                             [T.repeat(t * 1.0, 2)])[0], []),
                                [(4, np.arange(4)), (2, np.arange(2))]),
    'loop from two batches': (lambda: ([x], theano.scan(lambda column, h: T.tanh(column), [x.T], [shared(4)])[0], []),
                              [(4,), (2,)]),
}


def results(build, calls):
    """Return the outputs, or the class of the error, of each call."""
    inputs, outputs, updates = build()
    f, values = theano.function(inputs, outputs, updates=updates, mode=MODE), []
    for first, *others in calls:
        rows = np.random.RandomState(first).rand(first, 3) if inputs[0] is x else first
        try:
            values.append(f(rows, *others))
        except (ValueError, AssertionError, IndexError, TypeError):
            values.append('an error')
    return values


@pytest.mark.slow_with('loop from samples twice', 'slices of a data set', 'loop over two batches',
                       'positions from the second on')
@pytest.mark.filterwarnings('ignore::theano_mgpu.errors.MgpuWarning')  # batches that one device computes
@pytest.mark.parametrize('name', CASES)
def test_lengths_are_those_of_the_whole_batch(name, cpu2, enabled_functions):
    plain, ours = results(*CASES[name]), enabled_functions(lambda: results(*CASES[name]))
    for a, b in zip(plain, ours):
        assert isinstance(a, str) == isinstance(b, str), (a, b)
        if not isinstance(a, str):
            for one, other in zip(*[v if isinstance(v, list) else [v] for v in (a, b)]):
                assert one.shape == other.shape
                np.testing.assert_allclose(other, one, rtol=1e-12)


@pytest.fixture
def enabled_functions():
    """Return a function that calls another one with every `theano.function` divided."""
    def call(function):
        mgpu.enable(always=True)
        return function()
    with change_flags(floatX='float64'):
        yield call
    mgpu.disable()
