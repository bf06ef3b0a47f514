"""The network that MPI jobs of tests train."""
import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

from .modes import PYTHON

RAGGED = [7, 5, 8, 1, 3, 2]


def shared(rng, *shape, name):
    return theano.shared(np.asarray(rng.randn(*shape) * 0.3, theano.config.floatX), name=name)


class Network:
    """A small network with dropout, a running mean, a counter and Adam. Each rank starts with other weights."""

    def __init__(self, mode=PYTHON, dropout=True, seed=None, **options):
        from models import adam
        rng = np.random.RandomState(mgpu.rank() if seed is None else seed)
        x, labels = T.matrix('x'), T.ivector('labels')
        self.params = [shared(rng, 6, 16, name='w1'), shared(rng, 16, name='b1'), shared(rng, 16, 3, name='w2')]
        hidden = T.tanh(T.dot(x, self.params[0]) + self.params[1])
        if dropout:
            hidden *= MRG_RandomStreams(7).binomial((x.shape[0], 16), p=0.8, dtype=theano.config.floatX)
        probabilities = T.nnet.softmax(T.dot(hidden, self.params[2]))
        loss = T.nnet.categorical_crossentropy(probabilities, labels).mean() + 1e-3 * (self.params[0] ** 2).sum()
        self.mean, self.count = shared(rng, 6, name='mean'), theano.shared(np.int64(0), name='count')
        updates = {self.mean: T.cast(0.9 * self.mean + 0.1 * x.mean(axis=0), x.dtype),
                   self.count: self.count + x.shape[0]}
        right = T.eq(T.argmax(probabilities, axis=1), labels).sum(dtype='int64')
        self.step = mgpu.training_function([x, labels], loss, self.params, adam, [right, probabilities],
                                           batch_updates=updates, mode=mode, name='train', **options)
        self.predict = mgpu.function([x], probabilities, mode=mode, name='predict')

    def batches(self, rounds=3, first=0):
        """Yield the same ragged batches on every rank."""
        for number, n in enumerate(RAGGED * rounds):
            rng = np.random.RandomState(100 + number)
            batch = rng.randn(n, 6).astype(theano.config.floatX), rng.randint(0, 3, n).astype('int32')
            if number >= first:
                yield batch

    def values(self):
        """Return everything that training has changed, and the predictions for one batch."""
        arrays = [variable.variable.get_value() for variable in self.step.variables()
                  if isinstance(variable.variable.get_value(borrow=True), np.ndarray)]
        return arrays


def write(path, arrays):
    if mgpu.rank() == 0:
        np.savez(path, *arrays)


def no_memory(*_, **__):
    raise MemoryError('no memory left')
