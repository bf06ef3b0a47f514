"""MPI jobs in which each rank feeds its own data."""
import theano_mgpu as mgpu
from theano_mgpu.options import Strategy
from theano_mgpu.parallel_function import ParallelFunction

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

from .rank_network import PYTHON, Network, write

SLICED = np.random.RandomState(3).randn(23, 4)  # a data set


def shard(path, *n_batches):
    """Train on N batches of each rank's own; write the weights."""
    mgpu.init('a->cpu')
    network = Network(dropout=False, sharded=True)
    own = [batch for number, batch in enumerate(network.batches()) if number % mgpu.size() == mgpu.rank()]
    losses = [network.step(*batch)[0] for batch in own[:int(n_batches[mgpu.rank()])]]
    network.step.join()
    write(path, network.values())
    assert len(losses) == int(n_batches[mgpu.rank()])


def halves(path):
    """Train on batches of which each rank has an equal part; write the weights and Adam's state."""
    mgpu.init('a->cpu')
    network = Network(dropout=False, seed=1)
    for number, n in enumerate([10, 4, 12, 2]):
        rng = np.random.RandomState(number)
        x, labels = rng.randn(n, 6).astype('float32'), rng.randint(0, 3, n).astype('int32')
        own = slice(n * mgpu.rank() // mgpu.size(), n * (mgpu.rank() + 1) // mgpu.size())
        network.step(x[own], labels[own])
    write(path, network.values())


def other_shards():
    """Make a function with another number of logical shards on each rank."""
    mgpu.init('a->cpu')
    with theano.configparser.change_flags(**{'mgpu.logical_shards': 4 + mgpu.rank()}):
        Network()


def coupled_shards(path, n_batches='3'):
    """Train on samples of each rank's own, with a state each, and a rate; in the end the last rank has none.

    Writes the losses, the weights, and each rank's state.
    """
    mgpu.init('a->cpu')
    alone, n = mgpu.size() == 1, int(n_batches)
    own = slice(5) if alone else [slice(0, 3), slice(3, 5)][mgpu.rank()]
    step, weights, state = recurrent(len(range(5)[own]), sharded=True)
    losses, states = [], []
    for number in range(n - mgpu.rank()):
        x = recurrent_batch(number)[own]
        if alone and number == n - 1:
            x = x[:3]
            state.set_value(state.get_value()[:3])
        losses.append(step(x, np.float64(0.1 * (number + 1)))[0])
        states.append(state.get_value())
    step.join()
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *losses, *states, weights.get_value(), state.get_value())


def sliced(given, x, w):
    """Return the outputs of `sharded_slices` (a cost in which samples meet, and rows), its updates, and `given`."""
    rows = T.tanh(T.dot(x - x.mean(axis=0), w))
    cost = (rows ** 2).mean() / x.max()
    return [cost, rows], [(w, w - 0.1 * T.grad(cost, w))], given


def sharded_slices(path, *calls):
    """Slice batches from a data set of each rank's own, in N calls, maybe on the host; write results and weights."""
    mgpu.init('a->cpu;b->cpu')
    data = theano.shared(np.split(SLICED, [14])[mgpu.rank()], 'data')
    index, x, w = T.lscalar('index'), T.matrix('x', 'float64'), theano.shared(np.eye(4) * (1 + mgpu.rank()), 'w')
    outputs, updates, givens = sliced({x: data[index * 4:T.minimum((index + 1) * 4, data.shape[0])]}, x, w)
    step = ParallelFunction([index], outputs, updates, givens=givens, mode=PYTHON,
                            strategy=Strategy(data_sets_on_host=calls[2:] == ('host',)))
    found = [value for i in range(int(calls[mgpu.rank()])) for value in step(i)]
    step.join()
    report = mgpu.enable(always=True)
    plain = theano.function([index], data[index * 4:(index + 1) * 4], mode=PYTHON)
    np.testing.assert_array_equal(plain(0), data.get_value()[:4])
    assert 'samples of its own' in str(report) and '  host ' in str(report), report
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *found, w.get_value())


def recurrent(n, **options):
    """Return a step whose samples are coupled and have a state each, and whose rate is an input."""
    x, rate = T.matrix('x', 'float64'), T.scalar('rate', 'float64')
    w, h = theano.shared(np.full((4, 4), 0.3), 'w'), theano.shared(np.zeros((n, 4)), 'h')
    new = T.tanh(x - x.mean(axis=0) + T.dot(h, w))
    step = mgpu.training_function([x, rate], (new ** 2).sum() / x.max(), [w],
                                  lambda gradients: {w: w - rate * gradients[0]}, [new], batch_updates={h: new},
                                  mode=PYTHON, **options)
    return step, w, h


def recurrent_batch(number):
    return np.random.RandomState(number).randn(5, 4)


def refused(path):
    """Train on a graph that cannot be computed in parts: all ranks compute it whole, or none if each has its data."""
    mgpu.init('a->cpu;b->cpu')
    x, w = T.matrix('x', 'float64'), theano.shared(np.full(3, 0.5 + mgpu.rank()), 'w')
    z = T.dot(x, w)
    factor = T.slinalg.cholesky(z * z.dimshuffle(0, 'x') + T.eye(x.shape[0]))
    sums = factor.sum(axis=1) * MRG_RandomStreams(3).uniform((x.shape[0],), dtype='float64')

    def make(**options):
        return mgpu.training_function([x], (sums ** 2).mean(), [w], lambda gradients: {w: w - 0.01 * gradients[0]},
                                      [sums], mode=PYTHON, **options)
    error = ''
    if mgpu.size() > 1:
        try:
            make(sharded=True)
        except mgpu.GraphError as caught:
            error = str(caught)
    step = make()
    returned = [value for n in (5, 1, 4) for value in step(np.random.RandomState(n).randn(n, 3))]
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *returned, w.get_value(), np.array(error))
