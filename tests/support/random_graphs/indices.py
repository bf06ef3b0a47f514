"""Kinds of nodes: several batches along one axis, diagonals of pairs, and rows of tables that samples name."""
import theano.tensor as T

from .kinds import N, kind


class Indices:
    """A part of RandomGraph: its methods for batches along one axis, diagonals of pairs, and rows of tables."""

    @kind()
    def joined_batches(self):
        v, shape = self.pick(lambda s: N in s)
        axis = shape.index(N)
        other = self.pick(lambda s: s == shape)[0] if self.chance(0.7) else T.zeros_like(v) + 0.3
        both = T.tanh(T.concatenate([v, other], axis=axis))
        self.add(both, shape[:axis] + (2 * N,) + shape[axis + 1:])
        if self.chance(0.7):
            part = self.some(slice(0, self.samples()), slice(self.samples(), None), slice(-self.samples(), None))
            self.add(both[(slice(None),) * axis + (part,)], shape)

    @kind()
    def diagonal_of_pairs(self):
        v, shape = self.pick(lambda s: len(s) == 2 and s[0] == N)
        pairs = T.tanh(T.dot(v, self.pick(lambda s: s == shape)[0].T) / 5)
        if self.chance(0.3):
            self.add(T.fill_diagonal(pairs, self.some(0.5, -2)), (N, N))
        else:
            self.add(*(T.diag(pairs), (N,)) if self.chance(0.7) else (T.diag(T.diag(pairs)), (N, N)))

    @kind()
    def flat_places(self):
        v, shape = self.pick(lambda s: len(s) == 2 and s[0] == N)
        places = T.arange(self.samples()) * self.some(shape[1], v.shape[1]) + self.labels % shape[1]
        flat = v.flatten()
        if self.chance(0.5):
            self.add(flat[places], (N,))
        else:
            write = self.some(T.inc_subtensor, T.set_subtensor)
            self.add(write(flat[places], 0.4), (N * shape[1],))

    @kind()
    def rows_of_a_table(self):
        found = self.pick(lambda s: len(s) == 2 and s[0] == N and s[1] % 7)
        table = self.weight(6, found[1][1])
        write = self.some(T.inc_subtensor, T.inc_subtensor, T.set_subtensor)
        self.add(write(table[self.labels], found[0]), (6, found[1][1]))
