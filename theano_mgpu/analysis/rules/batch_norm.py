"""Batch normalisation: by the statistics of the whole batch, or of each replica's own samples."""
import theano
import theano.tensor as T

from ..shards import rule
from ..states import CONSTANT, NUMBER, ROWS, State


class Moments(theano.Op):
    """Mean and variance over axes, which are kept with a length of 1: for rules only, no function computes it."""

    __props__ = ('axes',)

    def __init__(self, axes):
        self.axes = tuple(axes)

    def make_node(self, x):
        return theano.Apply(self, [x], [v.type() for v in moments(x, self.axes)])

    def perform(self, node, inputs, storage):
        raise NotImplementedError('Moments is expanded by its rule')


def moments(x, axes):
    """Mean and variance as elementary ops."""
    mean = x.mean(axes, keepdims=True)
    return [mean, T.sqr(x - mean).mean(axes, keepdims=True)]


@rule(Moments)
def _moments(shards, node, values):
    x, axes = values[0], node.op.axes
    if x.kind != ROWS or x.axis not in axes:
        return [shards.converted(expression) for expression in moments(node.inputs[0], axes)]
    parts = shards.stacked(shards.make(lambda v: T.stack(_of_shard(v, axes)), [x], State(ROWS)))

    def merged(*given):
        return [T.patternbroadcast(new, old.broadcastable) for new, old in zip(_merged(*given), node.outputs)]
    return shards.make_all(merged, [parts, shards.portions()], [State(CONSTANT, size=NUMBER)] * 2)


_moments.for_constants = True


def _of_shard(x, axes):
    """Of a shard: the mean, what its rounding has left, and the mean of the squares of the distances from it."""
    mean = x.mean(axes, keepdims=True)
    centred = x - mean
    return mean, centred.mean(axes, keepdims=True), T.sqr(centred).mean(axes, keepdims=True)


def _merged(parts, portions):
    """The moments of the whole batch, from those of each shard and its portion of the samples.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979. The means
    may be large compared with their differences, which is why their rounding counts.
    """
    means, rests, squares = parts[:, 0], parts[:, 1], parts[:, 2]
    portions = T.shape_padright(T.cast(portions, means.dtype), means.ndim - 1)
    offsets = means - means[0] + rests
    offset = (portions * offsets).sum(axis=0)
    variances = squares - T.sqr(rests) + T.sqr(offsets - offset)
    return means[0] + offset, (portions * variances).sum(axis=0)
