"""Functions whose data sets are shared variables or constants: cases for one process, for devices, and for ranks."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T
from scipy import sparse
from theano.sparse import structured_dot

from support.modes import PYTHON

RNG = np.random.RandomState(0)
N, D, K = 61, 5, 3
X, ANSWERS = RNG.randn(N, D), (RNG.rand(N) > .5) * 1.
LABELS, GROUPS, MASK = RNG.randint(0, K, N), RNG.randint(0, 7, N), RNG.rand(N) > .4
PARAMETERS = RNG.randn(200) / 2
CASES = {}


def case(function):
    """Add a function that returns inputs, outputs, and maybe a callable to call before each call, and updates."""
    CASES[function.__name__] = function
    return function


def data():
    return theano.shared(X, 'X'), theano.shared(ANSWERS, 'y')


def with_gradient(cost, *parameters):
    return list(parameters), [cost, *T.grad(cost, list(parameters))]


def density(x, mean, scale):
    return -.5 * T.sqr((x - mean) / scale) - T.log(scale)


@case
def logistic():
    x, y = data()
    theta = T.dvector('theta')
    return with_gradient(T.nnet.binary_crossentropy(T.nnet.sigmoid(T.dot(x, theta[:-1]) + theta[-1]), y).mean(), theta)


@case
def without_bias():
    """Its vector of parameters could be divided, too, but replicas would exchange a value for each row."""
    x, y = data()
    w = T.dvector('w')
    return with_gradient(T.sqr(T.tanh(T.dot(x, w)) - y).mean(), w)


@case
def logistic_cg():
    """The parameters are shared, the labels cast: `logistic_cg.py` of the Deep Learning Tutorials."""
    x, y = data()[0], T.cast(theano.shared(LABELS.astype('float64'), 'y'), 'int32')
    theta = theano.shared(np.zeros((D + 1) * K), 'theta')
    p = T.nnet.softmax(T.dot(x, theta[:D * K].reshape((D, K))) + theta[D * K:])
    cost = -T.mean(T.log(p)[T.arange(y.shape[0]), y])
    values = iter(RNG.randn(3, (D + 1) * K))
    return [], [cost, T.grad(cost, theta)], lambda: theta.set_value(next(values), borrow=True)


@case
def multinomial():
    x, y = data()[0], theano.shared(LABELS, 'y')
    w, b = T.dmatrix('w'), T.dvector('b')
    return with_gradient(T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w) + b), y).mean(), w, b)


@case
def mixture():
    theta, x = T.dvector('theta'), T.constant(X[:, 0], 'x')
    each = density(x.dimshuffle(0, 'x'), theta[K:2 * K], T.exp(theta[2 * K:3 * K])) + \
        T.log(T.nnet.softmax(theta[:K])[0])
    most = each.max(axis=1, keepdims=True)
    return with_gradient((T.log(T.exp(each - most).sum(axis=1)) + most[:, 0]).sum(), theta)


@case
def hierarchical():
    theta, effects = T.dvector('theta'), T.dvector('effects')
    mean = effects[T.constant(GROUPS, 'groups')] + theta[1] * X[:, 0]
    return with_gradient(density(effects, theta[0], 2.).sum() + density(X[:, 1], mean, T.exp(theta[2])).sum(),
                         theta, effects)


@case
def descent():
    x, y = data()
    w = theano.shared(np.zeros(D), 'w')
    cost = T.sqr(T.dot(x, w) - y).mean()
    return [], [cost], None, [(w, w - .1 * T.grad(cost, w))]


@case
def residuals():
    x, y = data()
    w, v = T.dvector('w'), T.dvector('v')
    values = T.tanh(T.dot(x, w)) - y
    return [w, v], [values, T.Lop(values, w, T.Rop(values, w, v))]


@case
def validation():
    x, y, w = data()[0], theano.shared(LABELS, 'y'), theano.shared(RNG.randn(D, K), 'w')
    return [], [T.neq(T.argmax(T.dot(x, w), axis=1), y).mean()]


@case
def subset():
    x, y = data()
    w = T.dvector('w')
    return with_gradient(T.sqr(T.dot(x[:40], w) - y[:40]).mean(), w)


@case
def masked():
    x, y, mask, w = *data(), theano.shared(MASK, 'mask'), T.dvector('w')
    return with_gradient(T.sqr(T.dot(x[mask.nonzero()], w) - y[mask.nonzero()]).sum(), w)


@case
def standardised():
    x, y = data()
    w = T.dvector('w')
    return with_gradient(T.sqr(T.dot((x - x.mean(axis=0)) / x.std(axis=0), w) - y).mean(), w)


@case
def sparse_rows():
    x, y = theano.shared(sparse.csr_matrix(X * (X > 0)), 'X'), data()[1]
    w = T.dmatrix('w')
    return [w], [T.sqr(structured_dot(x, w)[:, 0] - y).mean()]


@case
def scanned():
    """Theano has the sums of a loop over samples in a state, so each replica has a loop of its own."""
    x, y = data()
    w = T.dvector('w')
    values, _ = theano.scan(lambda row, answer, w: T.sqr(T.dot(row, w) - answer), [x, y], non_sequences=w)
    return with_gradient(values.mean(), w)


def chains():
    """Return a function of 100 chains: its arguments are the batch, as ever."""
    x, y = data()
    w = T.dmatrix('w')
    values = T.dot(w, x.T)
    cost = (y * values - T.nnet.softplus(values)).sum(axis=1)
    return [w], [cost, T.grad(cost.sum(), w)]


def process():
    """Return the marginal likelihood of a Gaussian process, in which all samples meet."""
    x, y = data()
    theta = T.dvector('theta')
    squares = T.sqr(x.dimshuffle(0, 'x', 1) - x.dimshuffle('x', 0, 1)).sum(axis=2)
    factor = T.slinalg.cholesky(T.exp(theta[0] - squares) + T.exp(theta[1]) * T.eye(x.shape[0]))
    return [theta], [T.sqr(T.slinalg.solve_lower_triangular(factor, y)).sum() + T.log(T.diag(factor)).sum()]


SHAPES = {'w': (D,), 'v': (D,), 'b': (K,), 'effects': (7,), 'theta': (D + 1,)}


def values_of(make):
    """Return the arguments of three calls."""
    shapes = {**SHAPES, **{'multinomial': {'w': (D, K)}, 'mixture': {'theta': (3 * K,)}, 'chains': {'w': (100, D)},
                           'sparse_rows': {'w': (D, 1)}, 'process': {'theta': (2,)}}.get(make.__name__, {})}
    return [lambda v, i=i: np.random.RandomState(i).randn(*shapes[v.name]) / 2 for i in range(3)]


def results(make, mode):
    """Return the outputs of three calls of a case."""
    RNG.seed(1)
    inputs, outputs, before, updates = (*make(), None, None)[:4]
    function = theano.function(inputs, outputs, updates=updates, mode=mode, name=make.__name__)
    found = []
    for value in values_of(make):
        if before:
            before()
        found.append(function(*map(value, inputs)))
    return found


def differences(make, mode=PYTHON):
    """Return the largest difference from plain Theano, relative to the largest value, and the usage of the function."""
    mgpu.disable()
    expected = results(make, mode)
    report = mgpu.enable(always=True, tell=lambda text: None)
    found = results(make, mode)
    mgpu.disable()
    return max(np.abs(one - other).max() / max(1, np.abs(other).max())
               for ones, others in zip(found, expected) for one, other in zip(ones, others)), report.usages[-1]


if __name__ == '__main__':
    for name in sys.argv[1:]:
        difference, usage = differences(CASES[name])
        print('%s: %s, %s samples' % (name, 'alike' if difference < 1e-12 else difference, usage.samples), flush=True)
