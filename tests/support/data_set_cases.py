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
from theano.tensor.shared_randomstreams import RandomStreams

from support.modes import PYTHON

RNG = np.random.RandomState(0)
N, D, K = 61, 5, 3
X, ANSWERS = RNG.randn(N, D), (RNG.rand(N) > .5) * 1.
LABELS, GROUPS, MASK = RNG.randint(0, K, N), RNG.randint(0, 7, N), RNG.rand(N) > .4
PARAMETERS = RNG.randn(200) / 2
CASES = {}
CHAINS = 40


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
def sparse_subset():
    x, y = theano.shared(sparse.csr_matrix(X * (X > 0)), 'X')[:40], data()[1][:40]
    w = T.dmatrix('w')
    return [w], [T.sqr(structured_dot(x, w)[:, 0] - y).mean()]


@case
def scanned():
    """Theano has the sums of a loop over samples in a state, so each replica has a loop of its own."""
    x, y = data()
    w = T.dvector('w')
    values, _ = theano.scan(lambda row, answer, w: T.sqr(T.dot(row, w) - answer), [x, y], non_sequences=w)
    return with_gradient(values.mean(), w)


@case
def predictions():
    """The parameters could be divided, but replicas would add up a value for each row."""
    x, w = data()[0], T.dvector('w')
    return [w], [T.dot(x, w)]


@case
def kernel():
    """Samples meet in two stages: their weights add up to one."""
    (x, y), w = data(), T.dvector('w')
    weights = T.exp(-T.sqr(x - w).sum(axis=1))
    return with_gradient((weights * y).sum() / weights.sum(), w)


@case
def weighted():
    (x, y), w, mask = data(), T.dvector('w'), theano.shared(MASK * 1., 'mask')
    return with_gradient((mask * T.sqr(T.dot(x, w) - y)).sum() / mask.sum(), w)


@case
def largest():
    (x, y), w = data(), T.dvector('w')
    return with_gradient(abs(T.dot(x, w) - y).max(), w)


@case
def by_group():
    (x, y), w, groups = data(), T.dvector('w'), theano.shared(GROUPS, 'groups')
    return with_gradient(T.sqr(T.inc_subtensor(T.zeros((7,), 'float64')[groups], T.dot(x, w) - y)).sum(), w)


@case
def numbered():
    """The places of all samples are a constant, and no data set."""
    x, w = data()[0], T.dmatrix('w')
    return with_gradient(-T.log(T.nnet.softmax(T.dot(x, w)))[np.arange(N), LABELS].mean(), w)


@case
def columns():
    """The samples of one data set lie along its last axis: each replica has all of it."""
    x, y, w = theano.shared(X.T.copy(), 'X'), data()[1], T.dvector('w')
    return with_gradient(T.sqr(T.dot(w, x) - y).mean(), w)


@case
def factors():
    rows, columns = theano.shared(GROUPS, 'rows'), theano.shared(LABELS, 'columns')
    u, v = T.dmatrix('u'), T.dmatrix('v')
    return with_gradient(T.sqr((u[rows] * v[columns]).sum(axis=1) - X[:, 0]).sum() + T.sqr(u).sum(), u, v)


@case
def centres():
    """The means of a mixture are matrices of a few rows, and no batch."""
    x, u = data()[0], T.dmatrix('u')
    shares = T.nnet.softmax(-T.sqr(x.dimshuffle(0, 'x', 1) - u).sum(axis=2))
    means = T.dot(shares.T, x) / shares.sum(axis=0).dimshuffle(0, 'x')
    return [u], [means, (shares.dimshuffle(0, 1, 'x') * T.sqr(x.dimshuffle(0, 'x', 1) - means)).sum()]


@case
def noisy():
    (x, y), w, streams = data(), T.dvector('w'), RandomStreams(3)
    return with_gradient(T.sqr(T.dot(x * streams.uniform(x.shape), w) - y).mean(), w)


@case
def series():
    y, w = data()[0][:, 0], T.dvector('w')
    return with_gradient(density(y[1:], w[0] * y[:-1], T.exp(w[1])).sum(), w)


@case
def two_lengths():
    (x, y), w, x2, y2 = data(), T.dvector('w'), theano.shared(X[:23] * 2, 'X2'), theano.shared(ANSWERS[:23], 'y2')
    cost = T.sqr(T.dot(x, w) - y).mean()
    return [w], [cost, T.grad(cost, w), T.sqr(T.dot(x2, w) - y2).mean()]


@case
def single_precision():
    x, y, w = theano.shared(X.astype('float32'), 'X'), theano.shared(LABELS.astype('int8'), 'y'), T.dvector('w')
    return with_gradient(T.sqr(T.dot(x, w) - y).mean(), w)


@case
def newton():
    x, y = data()
    w = theano.shared(np.zeros(D), 'w')
    cost = (T.nnet.softplus(T.dot(x, w)) - y * T.dot(x, w)).mean()
    return [], [cost], None, [(w, w - T.slinalg.solve(T.hessian(cost, w), T.grad(cost, w)))]


@case
def sampler():
    """Hamiltonian Monte Carlo: the chains are no argument, but a variable that each call updates."""
    streams, x = RandomStreams(3), theano.shared(np.random.RandomState(5).randn(CHAINS, D), 'chains')
    size, rate = theano.shared(.1, 'size'), theano.shared(.9, 'rate')

    def energy(x):
        return T.sqr(T.sqr(x).sum(axis=1) - 1) + T.dot(x, T.constant(PARAMETERS[:D]))

    def leap(x, v, size):
        v = v - size * T.grad(energy(x).sum(), x)
        return x + size * v, v
    start = streams.normal(size=x.shape, dtype='float64')
    (xs, vs), _ = theano.scan(leap, outputs_info=[x, start], non_sequences=[size], n_steps=3)
    change = energy(x) + T.sqr(start).sum(axis=1) / 2 - energy(xs[-1]) - T.sqr(vs[-1]).sum(axis=1) / 2
    accepted = streams.uniform(size=(x.shape[0],), dtype='float64') < T.exp(change)
    new, mean = T.switch(accepted.dimshuffle(0, 'x'), xs[-1], x), .9 * rate + .1 * accepted.mean()
    return [], [new.sum(axis=1)], None, [(x, new), (rate, mean), (size, T.switch(mean > .9, 1.02, .98) * size)]


def chains():
    """Return a function of several chains: its arguments are the batch, as ever."""
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


def nearest():
    """Return a function of the nearest sample: its place among all samples is not known to a replica."""
    x, w = data()[0], T.dvector('w')
    distances = T.sqr(x - w).sum(axis=1)
    return [w], [data()[1][distances.argmin()], distances.min()]


@case
def survival():
    """Cox: sums over all samples that come later, of values that replicas have gathered."""
    (x, y), w = data(), T.dvector('w')
    score = T.dot(x, w)
    return [w], [(y * (score - T.log(T.cumsum(T.exp(score))))).sum()]


def recurrence():
    """Return the likelihood of a series whose variance depends on the turns before."""
    y, w = data()[0][:, 0], T.dvector('w')
    scales, _ = theano.scan(lambda last, scale, w: T.exp(w[0]) + .1 * T.sqr(last) + T.nnet.sigmoid(w[1]) * scale, y,
                            T.constant(np.array(1.)), w)
    return with_gradient(density(y, 0, T.sqrt(scales)).sum(), w)


@case
def by_place():
    """Only some samples count, of values that parameters change: no data set has these rows."""
    (x, y), w = data(), T.dvector('w')
    return with_gradient(T.sqr(T.dot(x, w) - y)[:40].mean(), w)


@case
def masked_later():
    """Some samples count, by a mask, of values that parameters change: each replica gets all of these."""
    (x, y), w, mask = data(), T.dvector('w'), theano.shared(MASK, 'mask')
    return with_gradient(T.sqr(T.dot(x, w) - y)[mask.nonzero()].sum(), w)


REFUSED = {nearest: 'X: the place of the maximum among all samples is not known to a replica',
           recurrence: 'X.*: it loops over samples, and each turn needs what the turns before have come to',
           process: 'X, y: Cholesky takes its matrix as a whole, and all samples meet there: Cholesky'}
SHAPES = {'u': (7, 4), 'w': (D,), 'v': (D,), 'b': (K,), 'effects': (7,), 'theta': (D + 1,)}


def values_of(make):
    """Return the arguments of three calls."""
    shapes = {**SHAPES, **{'multinomial': {'w': (D, K)}, 'mixture': {'theta': (3 * K,)}, 'chains': {'w': (CHAINS, D)},
                           'sparse_rows': {'w': (D, 1)}, 'sparse_subset': {'w': (D, 1)},
                           'numbered': {'w': (D, K)}, 'centres': {'u': (K, D)},
                           'factors': {'v': (K, 4)}, 'process': {'theta': (2,)}}.get(make.__name__, {})}
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
        assert difference < 1e-12, 'on rank %d: %s' % (mgpu.rank(), difference)  # rank 0 alone prints
        print('%s: %s, %s samples' % (name, 'alike' if difference < 1e-12 else difference, usage.samples), flush=True)
