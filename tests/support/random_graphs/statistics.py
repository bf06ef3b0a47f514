"""Kinds of nodes: softmax, statistics, random numbers, loops and branches."""
import numpy as np
import theano
import theano.tensor as T
from theano import sparse
from theano.ifelse import ifelse
from theano.tensor.nnet.bn import batch_normalization_train

from ..modes import PYTHON
from .kinds import CLASSES, N, kind


class Statistics:
    """A part of RandomGraph: its methods for softmax, statistics, random numbers, loops and branches."""

    @kind(2)
    def softmax(self):
        v, shape = self.pick(lambda s: len(s) == 2)
        self.add(self.some(T.nnet.softmax, T.nnet.logsoftmax)(v), shape)

    @kind()
    def cross_entropy(self):
        found = self.pick(lambda s: len(s) == 2 and s[0] == N and s[1] >= CLASSES and s[1] % 7)
        if not found:
            return False
        p = T.nnet.softmax(found[0])
        one_hot = T.extra_ops.to_one_hot(self.labels, found[1][1], dtype='float64')
        self.add(T.nnet.categorical_crossentropy(p, self.some(self.labels, one_hot)), (N,))

    @kind(2)
    def made(self):
        """Add constants of the batch's lengths."""
        n, k = self.samples(), self.some(3, 5)
        ways = [(T.zeros((n, k)) + 0.5, (N, k)), (T.ones((k, n)), (k, N)), (T.alloc(0.3, n, k), (N, k)),
                (T.arange(n) / T.cast(n, 'float64'), (N,)), (T.eye(n), (N, N)), (T.ones((n,)), (N,)),
                (T.alloc(self.weight(k), n, k), (N, k)), (T.ones_like(self.rows), (N, 6)),
                (T.tri(n, k), (N, k)), (T.arange(n * k).reshape((n, k)) / 100.0, (N, k)),
                (T.arange(n * k).reshape((k, n)) / 100.0, (k, N)), (T.arange(n * 3, dtype='float64') / 50, (N * 3,))]
        v, shape = self.some(*ways)
        found = self.pick(lambda s: s == shape)
        self.add(v * found[0] if found and self.chance(0.7) else T.cast(v, 'float64'), shape)

    @kind()
    def counted(self):
        """Add an item with a length as a number."""
        v, shape = self.pick()
        n = self.some(self.rows.shape[0], self.rows.size, v.size, self.rows.shape[0] // 2, T.minimum(self.samples(), 4),
                      self.rows.shape[0] % 3)
        self.add(v / (1.0 + n) if self.chance(0.5) else v * T.cast(n, 'float64') / 20, shape)

    @kind()
    def allocated(self):
        v, shape = self.pick(lambda s: len(s) < 3)
        n = self.some(self.samples(), 3)
        length = 3 if isinstance(n, int) else N
        self.add(T.alloc(v, n, *[v.shape[i] for i in range(len(shape))]), (length,) + shape)

    @kind(2)
    def random(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        # Few streams: Theano makes their states one by one.
        draw = self.some(lambda s: self.streams.binomial(s, p=0.6, dtype='float64', nstreams=4),
                         lambda s: self.streams.normal(s, dtype='float64', nstreams=4),
                         lambda s: self.others.uniform(s, dtype='float64'))
        noise = T.patternbroadcast(draw(v.shape), v.broadcastable)
        self.add(v * noise if self.chance(0.5) else v + noise, shape)

    @kind()
    def norm(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        if self.chance(0.5):
            return self.add(v / (0.1 + v.norm(self.some(1, 2))), shape)
        axis = self.random.randrange(len(shape))
        self.add(v / (0.1 + v.norm(2, axis=axis, keepdims=True)), shape)

    @kind()
    def normalised(self):
        found = self.pick(lambda s: len(s) == 2 and s[0] == N and s[1] % 7)
        if not found:
            return False
        v, shape = found
        k = shape[1]
        gamma, beta = [theano.shared(self.numbers.rand(1, k) + 0.5, broadcastable=(True, False)) for _ in range(2)]
        self.weights += [gamma, beta]
        y, mean, _ = batch_normalization_train(v, gamma, beta)
        self.add(y, shape)
        self.extra.append(mean)

    @kind(2)
    def ordered(self):
        v, shape = self.pick(lambda s: any(n % 7 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7])
        self.add(self.some(lambda: T.sort(v, axis), lambda: T.cumsum(v, axis), lambda: T.cumprod(T.tanh(v), axis),
                           lambda: T.argsort(v, axis), lambda: v + T.argmax(v, axis, keepdims=True))(), shape)

    @kind(2)
    def branched(self):
        v, shape = self.pick()
        other = self.some(self.pick(lambda s: s == shape)[0], T.zeros_like(v), v * 2)
        condition = self.some(T.gt(self.rows.sum(), 0), T.gt(self.rows.shape[0], 7), T.gt(v.sum(), 0.5))
        other = T.patternbroadcast(T.unbroadcast(other, *range(len(shape))) if shape else other, v.broadcastable)
        self.add(ifelse(condition, v, other), shape)

    @kind(4)
    def loop(self):
        v, shape = self.pick(lambda s: len(s) in (2, 3) and any(n % 7 and n > 1 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        order = [axis] + [i for i in range(len(shape)) if i != axis]
        v, shape = v.dimshuffle(*order), tuple(shape[i] for i in order)
        v = T.unbroadcast(v, *range(v.ndim))
        one, backwards, truncate = shape[1:], self.chance(0.2), 2 if self.chance(0.1) else -1
        start = self.some(T.zeros_like(v[0]), T.unbroadcast(T.zeros([v.shape[i] for i in range(1, len(shape))]),
                                                            *range(len(one))), v[0] * 0.1)
        start = T.unbroadcast(start, *range(len(one)))
        way, w = self.random.randrange(9), T.constant(0.3)
        if one[-1] % 7:
            w = self.weight(one[-1], one[-1]) if len(one) <= 2 else self.weight(one[-1])
        mixed = (lambda x, h: T.tanh(x + T.dot(h, w))) if w.ndim == 2 else (lambda x, h: T.tanh(x + h * w))
        options = dict(go_backwards=backwards, truncate_gradient=truncate, mode=PYTHON)
        if way == 0:
            out, _ = theano.scan(mixed, v, start, **options)
        elif way == 1:
            (out, other), _ = theano.scan(lambda x, h: [mixed(x, h), h.sum()], v, [start, None], **options)
            self.add(other, shape[:1])
        elif way == 2:
            out, _ = theano.scan(lambda x: T.tanh(x) * self.some(1, x.shape[0]), v, **options)
        elif way == 3:
            out, _ = theano.scan(lambda x, s: s * 0.9 + T.sqr(x).sum(), v, np.float64(0), **options)
            return self.add(out, shape[:1])
        elif way == 4:
            out, _ = theano.scan(lambda x: self.some(T.max, T.min, T.sum, T.mean)(x, axis=0), v, **options)
            return self.add(out, shape[:1] + one[1:])
        elif way == 5:
            (out, sums), _ = theano.scan(lambda x, h, s: [mixed(x, h), s + T.sqr(h).sum(0)], v,
                                         [start, T.zeros_like(start.sum(0))], **options)
            self.add(sums, shape[:1] + one[1:])
        elif way == 6:
            out, _ = theano.scan(lambda x, a, b: T.tanh(x + 0.5 * a - 0.3 * b), v,
                                 dict(initial=T.stack([start, start]), taps=[-1, -2]), **options)
        elif way == 7:
            c = self.pick(lambda s: s == one)
            if not c:
                return False
            out, _ = theano.scan(lambda h, c: T.tanh(h * 0.5 + c), None,
                                 start, T.unbroadcast(c[0], *range(len(one))), n_steps=shape[0], mode=PYTHON)
        else:
            out, _ = theano.scan(lambda i, x: T.tanh(x[i]) * i, T.arange(v.shape[0]), None, v, **options)
        self.add(out, shape)

    @kind(2)
    def counted_in_a_loop(self):
        """Add sums over samples from a loop with a counter and rows, maybe with a turn for each sample."""
        v, shape = self.pick(lambda s: len(s) > 0)
        v = T.unbroadcast(v, *range(v.ndim))
        n, steps = self.some((self.samples(), N), (3, 3), (3, 3))
        start, axes = T.unbroadcast(self.some(T.zeros_like, T.ones_like)(v.sum(0)), *range(v.ndim - 1)), shape[1:]
        (out, total, counter), _ = theano.scan(
            lambda h, s, i: [T.tanh(h * 0.7 + i), s * 0.5 + h.sum(0), i + 1], None, [v, start, np.float64(0)],
            n_steps=n, mode=PYTHON)
        self.some(lambda: self.add(out[-1], shape), lambda: self.add(total[-1], axes),
                  lambda: self.add(total.sum(0), axes), lambda: self.add(counter, (steps,)))()

    @kind(2)
    def placed(self):
        """Add numbers that each sample picks from its own row, along any axis."""
        v, shape = self.pick(lambda s: len(s) in (2, 3) and N in s)
        axis = self.some(*[i for i, n in enumerate(shape) if n == N])
        others = [i for i, n in enumerate(shape) if i != axis and n % 7 and n >= CLASSES]
        if not others:
            return False
        places, other = T.arange(self.samples()), self.some(*others)
        ways = [(places, self.labels, (N,)), (places.dimshuffle(0, 'x'), [[0, 2]], (N, 2)),
                (places.reshape((1, -1)), T.stack([self.labels, self.labels * 0]), (2, N)),
                (places.dimshuffle(0, 'x'), self.words % CLASSES, (N, 5))]
        own, index, together = self.some(*ways)
        entries = [slice(None)] * len(shape)
        entries[axis], entries[other] = own, index
        kept = [(i, n) for i, n in enumerate(shape) if i not in (axis, other)]
        ahead = [n for i, n in kept if abs(axis - other) == 1 and i < axis]
        if self.chance(0.6):
            behind = [n for i, n in kept if n not in ahead or len(kept) == 1 and not ahead]
            return self.add(v[tuple(entries)], ahead + list(together) + (behind if not ahead else []))
        write, base = self.some(T.set_subtensor, T.inc_subtensor), v if self.chance(0.6) else T.zeros_like(v)
        if len(together) > 1 and write is T.set_subtensor:
            return False  # Theano may keep any of several values
        self.add(write(base[tuple(entries)], self.some(T.constant(2.0), T.tanh(v[tuple(entries)]))), shape)

    @kind()
    def checked(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        lengths = [v.shape[i] if n % 7 == 0 or self.chance(0.5) else n for i, n in enumerate(shape)]
        condition = self.some(T.all(self.rows > -99), T.any(v > -1e9), T.lt(v.sum(), 1e30), T.gt(v.shape[0], 0))
        self.add(self.some(lambda: T.specify_shape(v, lengths), lambda: T.opt.Assert('checked')(v, condition))(), shape)

    @kind()
    def highest(self):
        v, shape = self.pick(lambda s: any(n % 7 and n > 2 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 2])
        out = [2 if i == axis else n for i, n in enumerate(shape)]
        self.add(self.some(T.sort, T.argsort)(v, axis=axis)[(slice(None),) * axis + (slice(-2, None),)], out)

    @kind(2)
    def of_whole_numbers(self):
        """Add small integers, with sums, maxima or means over them."""
        v, shape = self.pick()
        v = T.cast(T.clip(v * 5, -9, 9), self.some('int8', 'int32', 'int64'))
        w = self.some(lambda: v % 3, lambda: v // 2, lambda: v * self.some(2, v), lambda: T.eq(v, 2), lambda: T.abs_(v),
                      lambda: T.cast(v, 'int16') + v)()
        if shape and self.chance(0.6):
            axis = self.random.randrange(len(shape))
            total = self.some(T.sum, T.max, T.mean)(T.cast(w, 'int16'), axis=axis, keepdims=True)
            return self.add(self.some(w - total, total * w, T.cast(total, 'float64') + w), shape)
        self.add(w, shape)

    @kind()
    def branched_together(self):
        """Add two values of one branch, or of the other."""
        v, shape = self.pick()
        w, t = self.pick()
        condition = self.some(T.gt(self.rows.sum(), 0), T.gt(self.rows.shape[0], 7), T.lt(v.max(), 0.5))
        first, second = ifelse(condition, (v, w), (v * 0.5, T.patternbroadcast(T.zeros_like(w), w.broadcastable)))
        self.add(first, shape)
        self.add(second, t)

    @kind()
    def sparse_product(self):
        found = self.pick(lambda s: len(s) == 2 and s[1] % 7)
        if not found:
            return False
        v, shape = found
        v, w = sparse.csr_from_dense(theano.gradient.disconnected_grad(v)), self.weight(shape[1], 3)
        self.add(self.some(sparse.structured_dot, sparse.dot)(v, w), (shape[0], 3))

    @kind()
    def outer_product(self):
        found = self.pick(lambda s: len(s) == 1)
        if not found:
            return False
        (v, shape), (w, t) = found, self.pick(lambda s: len(s) == 1)
        self.add(T.tanh(T.outer(v, w)), shape + t)

    @kind()
    def rolled(self):
        v, shape = self.pick(lambda s: any(n % 7 and n > 1 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        self.add(T.roll(v, self.some(1, -1, 2), axis), shape)
