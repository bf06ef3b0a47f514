"""A random graph: its inputs, how items are chosen, and its outputs."""
import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

from .arithmetic import Arithmetic
from .indices import Indices
from .kinds import CLASSES, KINDS, N
from .shapes import Shapes
from .statistics import Statistics


class RandomGraph(Arithmetic, Indices, Shapes, Statistics):
    """A graph of chosen ops.

    Every item is a float64 variable and its shape for a batch of N samples. No other length is a multiple of 7, so
    that one which is depends on the number of samples.

    Parameters
    ----------
    random : random.Random
        The source of the choices. Its lowest choices give the smallest graph.

    Attributes
    ----------
    inputs, outputs : list of theano.Variable
    """

    def __init__(self, random):
        self.random, self.numbers = random, np.random.RandomState(0)
        self.weights, self.extra, self.streams, self.others = [], [], MRG_RandomStreams(1), RandomStreams(0)
        self.rows, self.series = T.dmatrix('rows'), T.dtensor3('series')
        self.labels, self.words = T.ivector('labels'), T.imatrix('words')
        self.inputs = [self.rows, self.series, self.labels, self.words]
        self.items = [(self.rows, (N, 6)), (self.series, (N, 4, 3))]
        for _ in range(self.random.randrange(1, 11)):
            self.some(*KINDS)(self)
        self._finish()

    def data(self, n):
        """Return arrays for the inputs: n samples."""
        numbers = np.random.RandomState(n)
        return [numbers.randn(n, 6), numbers.randn(n, 4, 3), numbers.randint(0, CLASSES, n).astype('int32'),
                numbers.randint(0, 6, (n, 5)).astype('int32')]

    def _finish(self):
        parts = [self.pick() for _ in range(self.random.randrange(1, 4))] + [self.items[-1]]
        loss = sum(self.some(T.mean, T.sum)(T.tanh(v)) * self.numbers.rand() for v, _ in parts)
        if self.weights and self.chance(0.3):
            loss = loss + 0.01 * (self.weights[0] ** 2).sum()
        self.outputs = [loss] + self.extra
        wanted = self.weights + ([self.rows] if self.chance(0.2) else [])
        if self.chance(0.75):
            try:
                self.outputs += theano.grad(loss, wanted, disconnected_inputs='ignore') if wanted else []
            except (NotImplementedError, ValueError, TypeError, AttributeError, theano.gradient.NullTypeGradError):
                pass  # Theano has no gradient of some, and fails for one of two branches
        self.outputs += [self.pick()[0] for _ in range(self.random.randrange(0, 3))]
        if self.chance(0.2):
            self.outputs += [update[1] for update in self.streams.state_updates]

    # ------------------------------------------------------------------------------------------------- choosing

    def chance(self, p):
        return self.random.randrange(100) >= 100 * (1 - p)

    def some(self, *choices):
        return self.random.choice(choices)

    def permutation(self, n):
        rest = list(range(n))
        return [rest.pop(self.random.randrange(len(rest))) for _ in range(n)]

    def pick(self, fits=lambda shape: True):
        """Return an item of a shape that fits, rather a late one; None if there is none."""
        found = [item for item in self.items if fits(item[1])]
        return found[-1 - min(self.some(0, 0, 0, 0, 1, 1, 2, 3), len(found) - 1)] if found else None

    def add(self, variable, shape):
        assert variable.ndim == len(shape), (variable, shape)
        if variable.dtype != 'float64':
            variable = T.cast(variable, 'float64')
        self.items.append((variable, tuple(shape)))

    def weight(self, *shape):
        value = self.numbers.randn(*shape) * 0.5
        self.weights.append(theano.shared(value, 'w%d' % len(self.weights)))
        return self.weights[-1]

    def samples(self):
        """Return the number of samples, in one of several ways to write it."""
        return self.some(self.rows.shape[0], self.labels.shape[0], self.series.shape[0], self.labels.size)

    def beside(self, v, shape):
        """Return another item, a weight or a constant that can be broadcast against an item."""
        way = self.random.randrange(6)
        if way == 0:
            return T.constant(self.numbers.randn(*(shape[-1:] or ())) if shape and shape[-1] % 7 else 0.7)
        if way == 1 and shape and shape[-1] % 7:
            return self.weight(shape[-1])
        if way == 2:
            return self.some(T.ones_like, T.zeros_like)(v) * 0.5
        found = self.pick(lambda s: s == shape)
        if way == 3 and shape:
            axis = self.random.randrange(len(shape))
            return self.some(T.mean, T.sum, T.max, T.min)(found[0], axis=axis, keepdims=True)
        return found[0]
