"""Random graphs over a batch, for tests that compare how they are cut with plain Theano."""
import numpy as np
import theano
import theano.tensor as T
from theano import sparse
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet.bn import batch_normalization_train
from theano.tensor.shared_randomstreams import RandomStreams

N, CLASSES = 14, 4
KINDS = []


def kind(weight=1):
    """Register a kind of node: a method of RandomGraph that adds an item, or returns False where none fits."""
    def register(function):
        KINDS.extend([function] * weight)
        return function
    return register


class RandomGraph:
    """A graph drawn by a seed.

    Every item is a float64 variable and its shape for a batch of N samples. No other length is a multiple of 7, so
    that one which is depends on the number of samples.

    Attributes
    ----------
    inputs, outputs : list of theano.Variable
    """

    def __init__(self, seed):
        self.draw = np.random.RandomState(seed)
        self.weights, self.extra, self.streams, self.others = [], [], MRG_RandomStreams(seed + 1), RandomStreams(seed)
        self.rows, self.series = T.dmatrix('rows'), T.dtensor3('series')
        self.labels, self.words = T.ivector('labels'), T.imatrix('words')
        self.inputs = [self.rows, self.series, self.labels, self.words]
        self.items = [(self.rows, (N, 6)), (self.series, (N, 4, 3))]
        steps = self.draw.randint(3, 11)
        while steps:
            steps -= KINDS[self.draw.randint(len(KINDS))](self) is not False
        self._finish()

    def data(self, n):
        """Arrays for the inputs: n samples."""
        draw = np.random.RandomState(n)
        return [draw.randn(n, 6), draw.randn(n, 4, 3), draw.randint(0, CLASSES, n).astype('int32'),
                draw.randint(0, 6, (n, 5)).astype('int32')]

    def _finish(self):
        parts = [self.pick() for _ in range(self.draw.randint(1, 4))] + [self.items[-1]]
        loss = sum(self.draw.choice([T.mean, T.sum])(T.tanh(v)) * self.draw.rand() for v, _ in parts)
        if self.weights and self.chance(0.3):
            loss = loss + 0.01 * (self.weights[0] ** 2).sum()
        self.outputs = [loss] + self.extra
        wanted = self.weights + ([self.rows] if self.chance(0.2) else [])
        if self.chance(0.75):
            try:
                self.outputs += theano.grad(loss, wanted, disconnected_inputs='ignore') if wanted else []
            except (NotImplementedError, ValueError, TypeError, AttributeError, theano.gradient.NullTypeGradError):
                pass  # Theano has no gradient of some, and fails for one of two branches
        self.outputs += [self.pick()[0] for _ in range(self.draw.randint(0, 3))]
        if self.chance(0.2):
            self.outputs += [update[1] for update in self.streams.state_updates]

    # ------------------------------------------------------------------------------------------------- choosing

    def chance(self, p):
        return self.draw.rand() < p

    def some(self, *choices):
        return choices[self.draw.randint(len(choices))]

    def pick(self, fits=lambda shape: True):
        """An item of a shape that fits, rather a late one; None if there is none."""
        found = [item for item in self.items if fits(item[1])]
        return found[-1 - min(int(self.draw.exponential(1.5)), len(found) - 1)] if found else None

    def add(self, variable, shape):
        assert variable.ndim == len(shape), (variable, shape)
        if variable.dtype != 'float64':
            variable = T.cast(variable, 'float64')
        self.items.append((variable, tuple(shape)))

    def weight(self, *shape):
        value = self.draw.randn(*shape) * 0.5
        self.weights.append(theano.shared(value, 'w%d' % len(self.weights)))
        return self.weights[-1]

    def samples(self):
        """The number of samples, and ways to write it."""
        return self.some(self.rows.shape[0], self.labels.shape[0], self.series.shape[0], self.labels.size)

    def beside(self, v, shape):
        """Another item, a weight or a constant that can be broadcast against an item."""
        way = self.draw.randint(6)
        if way == 0:
            return T.constant(self.draw.randn(*(shape[-1:] or ())) if shape and shape[-1] % 7 else 0.7)
        if way == 1 and shape and shape[-1] % 7:
            return self.weight(shape[-1])
        if way == 2:
            return self.some(T.ones_like, T.zeros_like)(v) * 0.5
        found = self.pick(lambda s: s == shape)
        if way == 3 and shape:
            axis = self.draw.randint(len(shape))
            return self.some(T.mean, T.sum, T.max, T.min)(found[0], axis=axis, keepdims=True)
        return found[0]

    # ------------------------------------------------------------------------------------------------ the kinds

    @kind(3)
    def unary(self):
        v, shape = self.pick()
        functions = [T.tanh, T.nnet.sigmoid, T.sqr, T.nnet.relu, T.neg, T.abs_, T.nnet.softplus, lambda x: x / 3,
                     lambda x: T.exp(T.tanh(x)), lambda x: T.log(1 + T.sqr(x)), lambda x: T.sqrt(1 + T.sqr(x)),
                     lambda x: T.clip(x, -0.7, 0.9), lambda x: T.switch(x > 0.1, x, 0.2 * x), T.sgn,
                     lambda x: T.cast(x > 0.2, 'float64'), lambda x: T.cast(x < 0.3, 'int32') * x,
                     lambda x: T.cast(x, 'float64'), theano.gradient.disconnected_grad, T.floor,
                     lambda x: theano.gradient.grad_clip(x, -0.01, 0.01), lambda x: x - x.shape[0] if x.ndim else x]
        self.add(functions[self.draw.randint(len(functions))](v), shape)

    @kind(4)
    def binary(self):
        v, shape = self.pick()
        other = self.beside(v, shape)
        functions = [T.add, T.sub, lambda a, b: T.tanh(a) * b, lambda a, b: a / (1 + T.sqr(b)), T.maximum, T.minimum,
                     lambda a, b: T.switch(T.gt(a, b + 0.01), a, b), lambda a, b: T.second(a, b), T.lt,
                     lambda a, b: T.fill(T.zeros_like(a), b) if b.ndim == a.ndim else a + b,
                     lambda a, b: T.switch(T.lt(b, 0.3) & T.gt(a, -0.2), 1.0, a)]
        out = functions[self.draw.randint(len(functions))](*((v, other) if self.chance(0.7) else (other, v)))
        if out.ndim != len(shape):
            return False
        self.add(out if out.broadcastable == v.broadcastable else out + T.zeros_like(v), shape)

    @kind(4)
    def reduction(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        axes = sorted(set(self.draw.randint(0, len(shape), self.draw.randint(1, len(shape) + 1))))
        keep, function = self.chance(0.4), self.some(T.sum, T.mean, T.max, T.min, T.prod, T.any, T.all, T.std, T.var)
        if function in (T.any, T.all):
            v = v > self.some(-1.5, 0, 1.5)
        if function is T.prod:
            v = T.tanh(v)
        if function is T.std:
            v = v + T.constant(self.draw.randn()) * T.arange(v.size, dtype='float64').reshape(v.shape)
        axis = None if len(axes) == len(shape) and self.chance(0.5) else \
            [int(a) if self.chance(0.6) else int(a) - len(shape) for a in axes]
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
        i = self.draw.randint(len(shape))
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

    @kind(3)
    def shuffled(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        order = [int(i) for i in self.draw.permutation(len(shape))]
        if len(order) < 4 and self.chance(0.3):
            order.insert(self.draw.randint(len(order) + 1), 'x')
        self.add(v.dimshuffle(*order), [1 if i == 'x' else shape[i] for i in order])

    @kind(5)
    def reshaped(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        lengths = [v.shape[i] if n % 7 == 0 or self.chance(0.3) else n for i, n in enumerate(shape)]
        shape = list(shape)
        for _ in range(self.draw.randint(1, 4)):
            i = self.draw.randint(len(shape))
            if self.chance(0.6) and i + 1 < len(shape):  # merge
                shape[i:i + 2], lengths[i:i + 2] = [shape[i] * shape[i + 1]], [lengths[i] * lengths[i + 1]]
            elif self.chance(0.2) and len(shape) < 4:
                shape.insert(i, 1)
                lengths.insert(i, 1)
            elif len(shape) < 4:  # split
                two = [n for n in (2, 3, 4) if shape[i] % n == 0 and shape[i] > n and (shape[i] // n) % N in (0, n % N)
                       or n == shape[i]] or [1]
                n = two[self.draw.randint(len(two))]
                rest = shape[i] // n
                if n > 1 and (shape[i] == N or shape[i] % (7 * N) == 0):
                    continue  # not for any N
                last = self.samples() * (rest // N) if rest % N == 0 and self.chance(0.9) else lengths[i] // n
                parts = [(n, n), (rest, last)]
                parts = parts if self.chance(0.5) else parts[::-1]
                shape[i:i + 1], lengths[i:i + 1] = [p[0] for p in parts], [p[1] for p in parts]
        if self.chance(0.05):  # anything else of as many elements
            order = self.draw.permutation(len(shape))
            shape, lengths = [shape[i] for i in order], [lengths[i] for i in order]
        if self.chance(0.4):
            lengths[self.draw.randint(len(lengths))] = -1
        ndim = len(shape)
        self.add(v.reshape(lengths, ndim=ndim) if self.chance(0.8) else v.reshape(T.stack(lengths), ndim=ndim), shape)

    @kind(2)
    def written_in_terms_of_samples(self):
        """A reshape whose lengths are of the batch, not of what is reshaped."""
        v, shape = self.pick(lambda s: len(s) > 0 and np.prod(s) % N == 0)
        rest = int(np.prod(shape)) // N
        if rest % 7 == 0:
            return False
        n = self.samples()
        each = v.size // n if self.chance(0.3) else rest
        ways = [((N, rest), (n, each)), ((N, rest), (n, -1)), ((N * rest,), (n * each,)), ((N, rest, 1), (n, -1, 1)),
                ((rest, N), (each, n)), ((rest, N), (-1, n))]
        shape, lengths = ways[self.draw.randint(len(ways) - self.some(0, 2, 2))]
        self.add(v.reshape(lengths, ndim=len(shape)), shape)

    @kind()
    def flattened(self):
        v, shape = self.pick(lambda s: len(s) > 1)
        outdim = self.draw.randint(1, len(shape))
        self.add(v.flatten(outdim), shape[:outdim - 1] + (int(np.prod(shape[outdim - 1:])),))

    @kind(3)
    def joined(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        other = self.pick(lambda s: s == shape)[0] if self.chance(0.7) else T.zeros_like(v) + 0.3
        if self.chance(0.4) and len(shape) < 4:
            axis = self.draw.randint(len(shape) + 1)
            return self.add(T.stack([v, other], axis=axis), shape[:axis] + (2,) + shape[axis:])
        axes = [i for i, n in enumerate(shape) if n % 7]
        if not axes:
            return False
        axis = axes[self.draw.randint(len(axes))]
        self.add(T.concatenate([v, other], axis=self.some(axis, axis - len(shape))),
                 [n * 2 if i == axis else n for i, n in enumerate(shape)])

    @kind(2)
    def split(self):
        v, shape = self.pick(lambda s: any(n % 7 and n > 1 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        k = self.draw.randint(1, shape[axis])
        parts = T.split(v, [k, shape[axis] - k] if self.chance(0.5) else T.stack([k, v.shape[axis] - k]), 2, axis)
        i = self.draw.randint(2)
        self.add(parts[i], shape[:axis] + ((k, shape[axis] - k)[i],) + shape[axis + 1:])

    @kind(2)
    def repeated(self):
        v, shape = self.pick(lambda s: 0 < len(s) < 4 and np.prod(s) < 2000)
        axis, times = self.draw.randint(len(shape)), self.some(2, 3)
        if self.chance(0.7):
            out = T.repeat(v, times, axis=int(axis))
        else:
            out = T.tile(v, [times if i == axis else 1 for i in range(len(shape))])
        self.add(out, [n * times if i == axis else n for i, n in enumerate(shape)])

    @kind(3)
    def indexed(self):
        v, shape = self.pick(lambda s: any(n % 7 for n in s))
        entries, lengths = [], []
        for n in shape:
            way = self.draw.randint(5)
            if n % 7 == 0 or way == 0:
                entries.append(slice(None))
                lengths.append(n)
            elif way == 1:
                entries.append(self.draw.randint(-n, n))
            else:
                start, stop = sorted(self.draw.choice(n + 1, 2, replace=False))
                entry = slice(int(start), int(stop), self.some(None, 1, 2)) if way < 4 else slice(None, None, -1)
                entries.append(entry)
                lengths.append(len(range(n)[entry]))
        while entries and entries[-1] == slice(None) and self.chance(0.5):
            entries.pop()
        if 0 in lengths:
            return False
        part = v[tuple(entries)]
        if self.chance(0.6) or not lengths:
            return self.add(part, lengths)
        write = self.some(T.set_subtensor, T.inc_subtensor)
        found = self.pick(lambda s: list(s) == lengths)
        new = found[0] if found and self.chance(0.6) else self.some(part * 2, T.ones_like(part), part.sum(), 0.3)
        if isinstance(new, T.TensorVariable) and new.ndim and any(
                a and not b for a, b in zip(new.broadcastable, part.broadcastable)):
            return False
        base = v if self.chance(0.6) else T.zeros_like(v)
        self.add(write(base[tuple(entries)], new), shape)

    @kind(2)
    def embedded(self):
        ids, shape = self.some((self.words, (N, 5)), (self.labels, (N,)), (self.words.T, (5, N)),
                               (self.words.flatten(), (5 * N,)), (self.words[:, 1], (N,)),
                               (self.words.dimshuffle(1, 0).flatten(), (5 * N,)))
        table = self.weight(6, 3) if self.chance(0.7) else (
            self.pick(lambda s: len(s) == 2 and s[0] == 6) or (self.weight(6, 3), (6, 3)))
        table, t = (table, (6, 3)) if not isinstance(table, tuple) else table
        self.add(T.tanh(table[ids]), shape + t[1:])

    @kind(2)
    def chosen(self):
        """One of each sample's numbers, by its label."""
        found = self.pick(lambda s: len(s) in (2, 3) and s[0] == N and s[1] >= CLASSES and s[1] % 7)
        if not found:
            return False
        v, shape = found
        places = T.arange(self.samples())
        if self.chance(0.6):
            return self.add(v[places, self.labels], (N,) + shape[2:])
        write = self.some(T.set_subtensor, T.inc_subtensor)
        base = v if self.chance(0.6) else T.zeros_like(v)
        new = self.some(T.constant(1.0), self.rows[:, 0] if len(shape) == 2 else T.constant(2.0))
        self.add(write(base[places, self.labels], new), shape)

    @kind(2)
    def picked(self):
        """x[:, idx] with an index of constants."""
        found = self.pick(lambda s: len(s) > 1 and any(n % 7 and n > 1 for n in s))
        if not found:
            return False
        v, shape = found
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        idx = self.draw.randint(0, shape[axis], 3 if self.chance(0.8) else (2, 2))
        entry = (slice(None),) * axis + (idx,)
        if len(shape) + idx.ndim - 1 > 4:
            return False
        if self.chance(0.6) or idx.ndim > 1:
            return self.add(v[entry], shape[:axis] + idx.shape + shape[axis + 1:])
        write = self.some(T.set_subtensor, T.inc_subtensor)
        base = v if self.chance(0.6) else T.zeros_like(v)
        self.add(write(base[entry], self.some(T.constant(0.2), base[entry] * 2, T.ones_like(base[entry]))), shape)

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
        """Constants of the batch's lengths."""
        n, k = self.samples(), self.some(3, 5)
        ways = [(T.zeros((n, k)) + 0.5, (N, k)), (T.ones((k, n)), (k, N)), (T.alloc(0.3, n, k), (N, k)),
                (T.arange(n) / T.cast(n, 'float64'), (N,)), (T.eye(n), (N, N)), (T.ones((n,)), (N,)),
                (T.alloc(self.weight(k), n, k), (N, k)), (T.ones_like(self.rows), (N, 6)),
                (T.tri(n, k), (N, k)), (T.arange(n * k).reshape((n, k)) / 100.0, (N, k)),
                (T.arange(n * k).reshape((k, n)) / 100.0, (k, N)), (T.arange(n * 3, dtype='float64') / 50, (N * 3,))]
        v, shape = ways[self.draw.randint(len(ways))]
        found = self.pick(lambda s: s == shape)
        self.add(v * found[0] if found and self.chance(0.7) else T.cast(v, 'float64'), shape)

    @kind()
    def counted(self):
        """A length as a number."""
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
        axis = self.draw.randint(len(shape))
        self.add(v / (0.1 + v.norm(2, axis=axis, keepdims=True)), shape)

    @kind()
    def normalised(self):
        found = self.pick(lambda s: len(s) == 2 and s[0] == N and s[1] % 7)
        if not found:
            return False
        v, shape = found
        k = shape[1]
        gamma, beta = [theano.shared(self.draw.rand(1, k) + 0.5, broadcastable=(True, False)) for _ in range(2)]
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
        way, w = self.draw.randint(9), T.constant(0.3)
        if one[-1] % 7:
            w = self.weight(one[-1], one[-1]) if len(one) <= 2 else self.weight(one[-1])
        mixed = (lambda x, h: T.tanh(x + T.dot(h, w))) if w.ndim == 2 else (lambda x, h: T.tanh(x + h * w))
        options = dict(go_backwards=backwards, truncate_gradient=truncate)
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
                                 start, T.unbroadcast(c[0], *range(len(one))), n_steps=shape[0])
        else:
            out, _ = theano.scan(lambda i, x: T.tanh(x[i]) * i, T.arange(v.shape[0]), None, v, **options)
        self.add(out, shape)

    @kind(2)
    def counted_in_a_loop(self):
        """Sums over samples beside a counter and rows, maybe a turn for each sample."""
        v, shape = self.pick(lambda s: len(s) > 0)
        v = T.unbroadcast(v, *range(v.ndim))
        n, steps = self.some((self.samples(), N), (3, 3), (3, 3))
        start, axes = T.unbroadcast(self.some(T.zeros_like, T.ones_like)(v.sum(0)), *range(v.ndim - 1)), shape[1:]
        (out, total, counter), _ = theano.scan(
            lambda h, s, i: [T.tanh(h * 0.7 + i), s * 0.5 + h.sum(0), i + 1], None, [v, start, np.float64(0)],
            n_steps=n)
        self.some(lambda: self.add(out[-1], shape), lambda: self.add(total[-1], axes),
                  lambda: self.add(total.sum(0), axes), lambda: self.add(counter, (steps,)))()

    @kind(2)
    def placed(self):
        """What each sample picks of its own row, along any axis."""
        v, shape = self.pick(lambda s: len(s) in (2, 3) and N in s)
        axis = self.some(*[i for i, n in enumerate(shape) if n == N])
        others = [i for i, n in enumerate(shape) if i != axis and n % 7 and n >= CLASSES]
        if not others:
            return False
        places, other = T.arange(self.samples()), self.some(*others)
        ways = [(places, self.labels, (N,)), (places.dimshuffle(0, 'x'), [[0, 2]], (N, 2)),
                (places.reshape((1, -1)), T.stack([self.labels, self.labels * 0]), (2, N)),
                (places.dimshuffle(0, 'x'), self.words % CLASSES, (N, 5))]
        own, index, together = ways[self.draw.randint(len(ways))]
        entries = [slice(None)] * len(shape)
        entries[axis], entries[other] = own, index
        kept = [(i, n) for i, n in enumerate(shape) if i not in (axis, other)]
        ahead = [n for i, n in kept if abs(axis - other) == 1 and i < axis]
        if self.chance(0.6):
            behind = [n for i, n in kept if n not in ahead or len(kept) == 1 and not ahead]
            return self.add(v[tuple(entries)], ahead + list(together) + (behind if not ahead else []))
        write, base = self.some(T.set_subtensor, T.inc_subtensor), v if self.chance(0.6) else T.zeros_like(v)
        if len(together) > 1 and write is T.set_subtensor:
            return False  # which one of several is kept is not known
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
        """Small integers, and what their sums come to."""
        v, shape = self.pick()
        v = T.cast(T.clip(v * 5, -9, 9), self.some('int8', 'int32', 'int64'))
        w = self.some(lambda: v % 3, lambda: v // 2, lambda: v * self.some(2, v), lambda: T.eq(v, 2), lambda: T.abs_(v),
                      lambda: T.cast(v, 'int16') + v)()
        if shape and self.chance(0.6):
            axis = self.draw.randint(len(shape))
            total = self.some(T.sum, T.max, T.mean)(T.cast(w, 'int16'), axis=axis, keepdims=True)
            return self.add(self.some(w - total, total * w, T.cast(total, 'float64') + w), shape)
        self.add(w, shape)

    @kind()
    def branched_together(self):
        """Two values of one branch, or of the other."""
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
