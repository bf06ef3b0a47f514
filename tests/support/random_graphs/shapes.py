"""Kinds of nodes: other shapes, joins and indices."""
import numpy as np
import theano.tensor as T

from .kinds import CLASSES, N, kind


class Shapes:
    """A part of RandomGraph: its methods for other shapes, joins and indices."""

    @kind(3)
    def shuffled(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        order = self.permutation(len(shape))
        if len(order) < 4 and self.chance(0.3):
            order.insert(self.random.randrange(len(order) + 1), 'x')
        self.add(v.dimshuffle(*order), [1 if i == 'x' else shape[i] for i in order])

    @kind(5)
    def reshaped(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        lengths = [v.shape[i] if n % 7 == 0 or self.chance(0.3) else n for i, n in enumerate(shape)]
        shape = list(shape)
        for _ in range(self.random.randrange(1, 4)):
            i = self.random.randrange(len(shape))
            if self.chance(0.6) and i + 1 < len(shape):  # merge
                shape[i:i + 2], lengths[i:i + 2] = [shape[i] * shape[i + 1]], [lengths[i] * lengths[i + 1]]
            elif self.chance(0.2) and len(shape) < 4:
                shape.insert(i, 1)
                lengths.insert(i, 1)
            elif len(shape) < 4:  # split
                two = [n for n in (2, 3, 4) if shape[i] % n == 0 and shape[i] > n and (shape[i] // n) % N in (0, n % N)
                       or n == shape[i]] or [1]
                n = self.some(*two)
                rest = shape[i] // n
                if n > 1 and (shape[i] == N or shape[i] % (7 * N) == 0):
                    continue  # not for any N
                last = self.samples() * (rest // N) if rest % N == 0 and self.chance(0.9) else lengths[i] // n
                parts = [(n, n), (rest, last)]
                parts = parts if self.chance(0.5) else parts[::-1]
                shape[i:i + 1], lengths[i:i + 1] = [p[0] for p in parts], [p[1] for p in parts]
        if self.chance(0.05):  # anything else of as many elements
            order = self.permutation(len(shape))
            shape, lengths = [shape[i] for i in order], [lengths[i] for i in order]
        if self.chance(0.4):
            lengths[self.random.randrange(len(lengths))] = -1
        ndim = len(shape)
        self.add(v.reshape(lengths, ndim=ndim) if self.chance(0.8) else v.reshape(T.stack(lengths), ndim=ndim), shape)

    @kind(2)
    def written_in_terms_of_samples(self):
        """Add a reshape whose lengths belong to the batch, not to the reshaped item."""
        v, shape = self.pick(lambda s: len(s) > 0 and np.prod(s) % N == 0)
        rest = int(np.prod(shape)) // N
        if rest % 7 == 0:
            return False
        n = self.samples()
        each = v.size // n if self.chance(0.3) else rest
        ways = [((N, rest), (n, each)), ((N, rest), (n, -1)), ((N * rest,), (n * each,)), ((N, rest, 1), (n, -1, 1)),
                ((rest, N), (each, n)), ((rest, N), (-1, n))]
        shape, lengths = ways[self.random.randrange(len(ways) - self.some(0, 2, 2))]
        self.add(v.reshape(lengths, ndim=len(shape)), shape)

    @kind()
    def flattened(self):
        v, shape = self.pick(lambda s: len(s) > 1)
        outdim = self.random.randrange(1, len(shape))
        self.add(v.flatten(outdim), shape[:outdim - 1] + (int(np.prod(shape[outdim - 1:])),))

    @kind(3)
    def joined(self):
        v, shape = self.pick(lambda s: len(s) > 0)
        other = self.pick(lambda s: s == shape)[0] if self.chance(0.7) else T.zeros_like(v) + 0.3
        if self.chance(0.4) and len(shape) < 4:
            axis = self.random.randrange(len(shape) + 1)
            return self.add(T.stack([v, other], axis=axis), shape[:axis] + (2,) + shape[axis:])
        axes = [i for i, n in enumerate(shape) if n % 7]
        if not axes:
            return False
        axis = self.some(*axes)
        self.add(T.concatenate([v, other], axis=self.some(axis, axis - len(shape))),
                 [n * 2 if i == axis else n for i, n in enumerate(shape)])

    @kind(2)
    def split(self):
        v, shape = self.pick(lambda s: any(n % 7 and n > 1 for n in s))
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        k = self.random.randrange(1, shape[axis])
        parts = T.split(v, [k, shape[axis] - k] if self.chance(0.5) else T.stack([k, v.shape[axis] - k]), 2, axis)
        i = self.random.randrange(2)
        self.add(parts[i], shape[:axis] + ((k, shape[axis] - k)[i],) + shape[axis + 1:])

    @kind(2)
    def repeated(self):
        v, shape = self.pick(lambda s: 0 < len(s) < 4 and np.prod(s) < 2000)
        axis, times = self.random.randrange(len(shape)), self.some(2, 3)
        if self.chance(0.7):
            out = T.repeat(v, times, axis=axis)
        else:
            out = T.tile(v, [times if i == axis else 1 for i in range(len(shape))])
        self.add(out, [n * times if i == axis else n for i, n in enumerate(shape)])

    @kind(3)
    def indexed(self):
        v, shape = self.pick(lambda s: any(n % 7 for n in s))
        entries, lengths = [], []
        for n in shape:
            way = self.random.randrange(5)
            if n % 7 == 0 or way == 0:
                entries.append(slice(None))
                lengths.append(n)
            elif way == 1:
                entries.append(self.random.randrange(-n, n))
            else:
                start, stop = sorted(self.permutation(n + 1)[:2])
                entry = slice(start, stop, self.some(None, 1, 2)) if way < 4 else slice(None, None, -1)
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
        """Add one of each sample's numbers, by its label."""
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
        """Add x[:, idx] with an index of constants."""
        found = self.pick(lambda s: len(s) > 1 and any(n % 7 and n > 1 for n in s))
        if not found:
            return False
        v, shape = found
        axis = self.some(*[i for i, n in enumerate(shape) if n % 7 and n > 1])
        idx = np.array(self.some([0, 1, 1], [1, 0, 0], [-1, 0, -1], [[1, 0], [0, 0]]))
        entry = (slice(None),) * axis + (idx,)
        if len(shape) + idx.ndim - 1 > 4:
            return False
        if self.chance(0.6) or idx.ndim > 1:
            return self.add(v[entry], shape[:axis] + idx.shape + shape[axis + 1:])
        write = self.some(T.set_subtensor, T.inc_subtensor)
        base = v if self.chance(0.6) else T.zeros_like(v)
        self.add(write(base[entry], self.some(T.constant(0.2), base[entry] * 2, T.ones_like(base[entry]))), shape)
