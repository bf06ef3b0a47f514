"""Drawn programs over lengths other than the batch has: expressions, one row for all samples, k rows for each.

Many of them are errors on one device, or would be on batches of another length. A value is right if it is the value of
one device; a program that is refused, or a batch that is, may be computed by one device.
"""
import numpy as np
import theano
import theano.tensor as T
from theano.ifelse import ifelse

FEATURES = 3


class LengthProgram:
    """A graph of chosen ops over `x` of (N, 3) floats, `labels` and a number; nothing keeps its lengths equal.

    Parameters
    ----------
    random : random.Random
        The source of the choices.
    length : int
        N, which some constants have as their length.

    Attributes
    ----------
    inputs : list of theano.Variable
        With samples.
    flag : SharedVariable
        The condition of branches.
    outputs : list of theano.Variable
    """

    def __init__(self, random, length):
        self.random, self.length = random, length
        self.x, self.labels = T.dmatrix('x'), T.lvector('labels')
        self.inputs, self.flag = [self.x, self.labels], theano.shared(np.int64(random.randrange(2)), 'flag')
        numbers = np.random.RandomState(random.randrange(1000))
        lengths = [length] * 6 + [1, 2 * length, 3 * length, length + 1, 24]
        self.matrices = [self.x] + [theano.shared(numbers.rand(self.some(lengths), FEATURES), 'c') for _ in range(2)]
        self.vectors = [theano.shared(numbers.rand(self.some(lengths)), 'v') for _ in range(2)]
        self.places = [self.labels, theano.shared(numbers.randint(0, 3, self.some(lengths)), 'places')]
        steps = [self.lengthen, self.meet, self.meet, self.write, self.choose, self.of_labels, self.loop, self.slice,
                 self.fill]
        for _ in range(random.randrange(2, 7)):
            self.some(steps)()
        self.outputs = [self.some(self.matrices[3:] or self.matrices), self.some(self.vectors)]
        if self.chance(0.5):
            self.outputs[0] = self.some([T.sum, T.mean, T.max])(self.outputs[0], axis=self.some([0, 0, None]))
        if self.chance(0.4):
            cost = T.sqr(self.matrices[-1]).sum() + T.tanh(self.vectors[-1]).mean()
            wrt = self.some([self.x, self.matrices[1], self.matrices[2], self.vectors[0]])
            self.outputs.append(T.grad(cost, wrt, disconnected_inputs='ignore'))

    def some(self, choices):
        return choices[self.random.randrange(len(choices))]

    def chance(self, probability):
        return self.random.random() < probability

    def matrix(self):
        return self.some(self.matrices[-4:] + [self.x])

    def vector(self):
        return self.some(self.vectors[-3:] + [self.x[:, 0]])

    def n(self):
        """Return a length as an expression."""
        n = self.some([self.x.shape[0], self.labels.shape[0], self.matrix().shape[0], self.vector().shape[0]])
        return self.some([n] * 8 + [n * 2, n * 2 // 2, n + 1, T.minimum(n, self.labels.shape[0]),
                          T.constant(self.length), T.maximum(1, n - 2), self.matrix().size // FEATURES])

    def lengthen(self):
        m = self.matrix()
        k = self.some([1, 2, 3])
        self.matrices.append(self.some([
            lambda: T.repeat(m, k, axis=0), lambda: T.concatenate([m] * k), lambda: m[::-1],
            lambda: T.unbroadcast(m[:1], 0), lambda: T.unbroadcast(m.mean(axis=0, keepdims=True), 0),
            lambda: T.concatenate([m, self.matrix()]), lambda: m.reshape((-1, FEATURES)),
            lambda: T.addbroadcast(m[:self.n()], 0) + self.matrix(), lambda: T.addbroadcast(m, 0) * self.matrix(),
            lambda: m.reshape((self.n(), FEATURES))])())

    def meet(self):
        a, b = self.matrix(), self.matrix()
        u, v = self.vector(), self.vector()
        self.matrices.append(self.some([
            lambda: a + b, lambda: a * T.tanh(b), lambda: T.maximum(a, b), lambda: T.switch(T.gt(a, 0.4), a, b),
            lambda: a * u.dimshuffle(0, 'x'), lambda: T.concatenate([a, b], axis=1)[:, 1:1 + FEATURES],
            lambda: T.stack([a, b], axis=1).sum(axis=1), lambda: T.dot(a.T, b), lambda: T.second(a, b),
            lambda: T.batched_dot(a.dimshuffle(0, 1, 'x'), b.dimshuffle(0, 'x', 1)).sum(axis=1),
            lambda: a - T.nnet.softmax(b)])())
        self.vectors.append(self.some([
            lambda: u + v, lambda: u * v, lambda: T.switch(T.lt(u, v), u, v), lambda: u + a[:, 1],
            lambda: T.join(0, u, v), lambda: T.dot(a, b[0]), lambda: T.batched_dot(a, b)])())

    def choose(self):
        condition = self.some([self.flag, T.gt(self.x.sum(), 4.0), T.eq(self.n(), self.length)])
        if self.chance(0.6):
            self.matrices.append(ifelse(condition, self.matrix(), self.matrix()))
        else:
            self.vectors.append(ifelse(condition, self.vector(), self.vector()))

    def of_labels(self):
        m, places = self.matrix(), self.some(self.places + [self.labels, T.repeat(self.labels, 2)])
        p = T.exp(m) / T.exp(m).sum(axis=1, keepdims=True)
        self.vectors.append(self.some([
            lambda: T.nnet.crossentropy_categorical_1hot(p, places), lambda: m[T.arange(self.n()), places],
            lambda: m[T.arange(places.shape[0]), places], lambda: m[T.arange(m.shape[0]), places],
            lambda: T.nnet.categorical_crossentropy(p, places), lambda: self.vector()[places],
            lambda: m[places, places]])())
        self.matrices.append(self.some([lambda: m[places], lambda: self.matrices[1][places],
                                        lambda: T.extra_ops.to_one_hot(places, FEATURES)])())

    def write(self):
        m, y, places = self.matrix(), self.matrix(), self.some(self.places)
        column = self.some([self.vector(), y[:, 0], T.unbroadcast(self.vector()[:1], 0)])
        write = self.some([T.set_subtensor, T.inc_subtensor])
        self.matrices.append(self.some([
            lambda: write(m[:, 1], column), lambda: write(m[:], y), lambda: write(m[:self.n()], y),
            lambda: write(m[T.arange(self.n()), places], column), lambda: write(m[places], y),
            lambda: write(m[:, :2], y[:, 1:]),
            lambda: T.inc_subtensor(T.zeros_like(self.matrices[1])[places], y)])())

    def loop(self):
        m, v = self.matrix(), self.vector()
        if self.chance(0.5):
            values, _ = theano.map(lambda a, b: a.sum() * b, [m, v])
            self.vectors.append(values)
        else:
            start = self.some([self.vector(), T.zeros_like(self.x[:, 0]), T.alloc(0.0, self.n())])
            states, _ = theano.scan(lambda a, h: T.tanh(self.some([a + h, a, h * 0.5 + a])), [m.T], [start])
            self.vectors.append(self.some([states[-1], states.sum(axis=0)]))

    def slice(self):
        n = self.n()
        self.vectors.append(self.vector()[self.some([slice(n), slice(0, n), slice(1, n + 1), slice(n, n + n)])])
        self.matrices.append(self.matrix()[:self.n()])

    def fill(self):
        n, v, m = self.n(), self.vector(), self.matrix()
        self.matrices.append(self.some([
            lambda: T.alloc(m, n, FEATURES), lambda: T.alloc(m[0], n, FEATURES), lambda: T.ones((n, FEATURES)) * m,
            lambda: T.alloc(m, 2, n, FEATURES)[1], lambda: T.arange(n).dimshuffle(0, 'x') * m,
            lambda: T.unbroadcast(T.ones((n, FEATURES))[:1], 0) * m])())
        self.vectors.append(self.some([lambda: T.alloc(v, n), lambda: T.arange(n) * 1.0, lambda: T.zeros_like(v) + n,
                                       lambda: T.fill(v, 0.5)])())

    def data(self):
        """Return a batch: x and labels."""
        numbers = np.random.RandomState(1)
        return [numbers.rand(self.length, FEATURES), numbers.randint(0, FEATURES, self.length)]
