"""Kinds of nodes: elementwise ops, reductions and products."""
import theano
import theano.tensor as T

from .kinds import kind


class Arithmetic:
    """A part of RandomGraph: its methods for elementwise ops, reductions and products."""

    @kind(3)
    def unary(self):
        v, shape = self.pick()
        functions = [T.tanh, T.nnet.sigmoid, T.sqr, T.nnet.relu, T.neg, T.abs_, T.nnet.softplus, lambda x: x / 3,
                     lambda x: T.exp(T.tanh(x)), lambda x: T.log(1 + T.sqr(x)), lambda x: T.sqrt(1 + T.sqr(x)),
                     lambda x: T.clip(x, -0.7, 0.9), lambda x: T.switch(x > 0.1, x, 0.2 * x), T.sgn,
                     lambda x: T.cast(x > 0.2, 'float64'), lambda x: T.cast(x < 0.3, 'int32') * x,
                     lambda x: T.cast(x, 'float64'), theano.gradient.disconnected_grad, T.floor,
                     lambda x: theano.gradient.grad_clip(x, -0.01, 0.01), lambda x: x - x.shape[0] if x.ndim else x]
        self.add(self.some(*functions)(v), shape)

    @kind(4)
    def binary(self):
        v, shape = self.pick()
        other = self.beside(v, shape)
        functions = [T.add, T.sub, lambda a, b: T.tanh(a) * b, lambda a, b: a / (1 + T.sqr(b)), T.maximum, T.minimum,
                     lambda a, b: T.switch(T.gt(a, b + 0.01), a, b), lambda a, b: T.second(a, b), T.lt,
                     lambda a, b: T.fill(T.zeros_like(a), b) if b.ndim == a.ndim else a + b,
                     lambda a, b: T.switch(T.lt(b, 0.3) & T.gt(a, -0.2), 1.0, a)]
        out = self.some(*functions)(*((v, other) if self.chance(0.7) else (other, v)))
        if out.ndim != len(shape):
            return False
        self.add(out if out.broadcastable == v.broadcastable else out + T.zeros_like(v), shape)

    @kind(4)
    def reduction(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        axes = sorted({self.random.randrange(len(shape)) for _ in range(self.random.randrange(1, len(shape) + 1))})
        keep, function = self.chance(0.4), self.some(T.sum, T.mean, T.max, T.min, T.prod, T.any, T.all, T.std, T.var)
        if function in (T.any, T.all):
            v = v > self.some(-1.5, 0, 1.5)
        if function is T.prod:
            v = T.tanh(v)
        if function is T.std:
            v = v + T.constant(self.numbers.randn()) * T.arange(v.size, dtype='float64').reshape(v.shape)
        axis = None if len(axes) == len(shape) and self.chance(0.5) else \
            [a if self.chance(0.6) else a - len(shape) for a in axes]
        if axis is not None and len(axis) == 1 and self.chance(0.5):
            axis, = axis
        self.add(function(v, axis=axis, keepdims=keep),
                 [1 if i in axes else n for i, n in enumerate(shape) if keep or i not in axes])
        if keep and self.chance(0.7):
            self.items[-1] = (self.items[-1][0] + v, shape) if v.dtype == 'float64' else self.items[-1]

    @kind(4)
    def dense(self):
        v, shape = self.pick(lambda s: len(s) in (1, 2) and s[-1] % 7)
        out = self.some(3, 5)
        w = self.weight(shape[-1], out)
        if self.chance(0.15):
            self.add(T.tanh(T.dot(v, self.weight(shape[-1]))), shape[:-1])
        else:
            self.add(T.tanh(T.dot(v, w) + self.weight(out)), shape[:-1] + (out,))

    @kind(2)
    def product(self):
        found = self.pick(lambda s: len(s) in (1, 2))
        if not found:
            return False
        (a, s), (b, t) = found, self.pick(lambda s: len(s) in (1, 2))
        if len(s) == 2 and self.chance(0.5):
            a, s = a.T, s[::-1]
        if len(t) == 2 and s[-1] != t[max(0, len(t) - 2)]:
            b, t = b.T, t[::-1]
        if s[-1] != t[max(0, len(t) - 2)]:
            return False
        self.add(T.tanh(T.dot(a, b) / self.some(5.0, a.shape[-1])), s[:-1] + (t[1:] if len(t) == 2 else ()))

    @kind(2)
    def batched(self):
        v, shape = self.pick(lambda s: len(s) in (2, 3))
        w, t = self.pick(lambda s: len(s) in (2, 3) and s[0] == shape[0])
        if shape[-1] != t[max(1, len(t) - 2)]:
            if len(t) < 3 or shape[-1] != t[2]:
                return False
            w, t = w.dimshuffle(0, 2, 1), (t[0], t[2], t[1])
        self.add(T.tanh(T.batched_dot(v, w)), shape[:-1] + t[2:] if len(t) == 3 else shape[:-1])

    @kind(2)
    def tensor_product(self):
        v, shape = self.pick(lambda s: len(s) > 1)
        i = self.random.randrange(len(shape))
        if self.chance(0.3):
            other, t = self.pick(lambda s: len(s) > 0 and shape[i] in s)
            j = t.index(shape[i])
        elif shape[i] % 7:
            t, j = (shape[i], 2), 0
            other = self.weight(*t)
        else:
            return False
        out = shape[:i] + shape[i + 1:] + t[:j] + t[j + 1:]
        if len(out) > 4:
            return False
        self.add(T.tanh(T.tensordot(v, other, [[i], [j]])), out)
