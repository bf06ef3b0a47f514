"""Batch normalisation, by the statistics of the whole batch."""
from __future__ import annotations

from typing import Callable, Iterable

import theano
import theano.tensor as T
from theano.gof.graph import variables
from theano.gof.opt import copy_stack_trace
from theano.tensor.nnet import bn

from ..reductions import STACK
from ..shards import rule
from ..states import CONSTANT, DEPENDENT, ROWS, WHOLE, State, Value

TRAINING = bn.AbstractBatchNormTrain, bn.AbstractBatchNormTrainGrad


class Moments(theano.Op):
    """The mean and variance over axes, which are kept with a length of 1: for rules only, no function computes it."""

    __props__ = ('axes',)

    def __init__(self, axes: Iterable[int]) -> None:
        self.axes = tuple(axes)

    def make_node(self, x: theano.Variable) -> theano.Apply:
        return theano.Apply(self, [x], [v.type() for v in moments(x, self.axes)])


def elementary(node: theano.Apply, inputs: list[theano.Variable]) -> list[theano.Variable]:
    """Return the outputs of batch normalisation in training, or its gradient, by the whole batch, as simpler ops."""
    expand: Callable[..., list[theano.Variable]] = _normalised if isinstance(node.op, bn.AbstractBatchNormTrain) else \
        _gradients if _are_statistics_of(node) else _gradients_at
    new = [T.patternbroadcast(T.cast(variable, old.dtype), old.broadcastable)
           for variable, old in zip(expand(node.op.axes, *inputs), node.outputs)]
    for variable in set(variables(inputs, new)).difference(inputs):
        copy_stack_trace(node.outputs[0], variable)  # the user's line, for errors
    return new


def _are_statistics_of(node):
    """Return whether the mean and deviation in a gradient are the statistics of its own samples."""
    x, mean, inverse = [node.inputs[i] for i in (0, 3, 4)]
    train = mean.owner
    return bool(train) and isinstance(train.op, bn.AbstractBatchNormTrain) and train.op.axes == node.op.axes \
        and train.inputs[0] is x and [mean, inverse] == train.outputs[1:3]


def _normalised(axes, x, scale, bias, epsilon, factor, running_mean=None, running_variance=None):
    """Expand as Theano's local_abstract_batch_norm_train does, but compute all batch-wide statistics at once."""
    mean, variance = Moments(axes)(x)
    if (variance.dtype, epsilon.dtype) == ('float32', 'float64'):
        epsilon = epsilon.astype('float32')
    inverse = T.inv(T.sqrt(variance + epsilon))
    new = [(x - mean) * (scale * inverse) + bias, mean, inverse]
    if running_mean is not None:
        new.append(running_mean * (1.0 - factor) + mean * factor)
    if running_variance is not None:
        m = T.cast(T.prod(x.shape) / T.prod(scale.shape), theano.config.floatX)
        new.append(running_variance * (1.0 - factor) + (m / (m - 1)) * variance * factor)
    return new


def _gradients(axes, x, dy, scale, mean, inverse, epsilon):
    """Return the gradients with regard to x, scale and bias.

    In Theano's local_abstract_batch_norm_train_grad, one mean is part of the argument of another mean. But `mean` is
    the mean of x, so the mean of ``x - mean`` is 0, and two sums of one stage remain.
    """
    centred = x - mean
    total, projected = dy.sum(axes, keepdims=True), (dy * centred).sum(axes, keepdims=True)
    m = T.mul(*[x.shape[axis] for axis in axes], 1).astype(x.dtype)
    dx = scale * inverse * (dy - total / m - centred * (projected / m * T.sqr(inverse)))
    return [dx, projected * inverse, total]


def _gradients_at(axes, x, dy, scale, mean, inverse, epsilon):
    """Return the gradients as Theano's local_abstract_batch_norm_train_grad does: for any mean."""
    centred = x - mean
    c = dy * inverse - centred * ((dy * centred).mean(axes, keepdims=True) * inverse ** 3)
    return [scale * (c - c.mean(axes, keepdims=True)), (dy * inverse * centred).sum(axes, keepdims=True),
            dy.sum(axes, keepdims=True)]


def moments(x: theano.Variable, axes: tuple[int, ...]) -> list[theano.Variable]:
    """Return mean and variance as elementary ops."""
    mean = x.mean(axes, keepdims=True)
    return [mean, T.sqr(x - mean).mean(axes, keepdims=True)]


@rule(Moments, of=CONSTANT)
def _moments(shards, node, values):
    x, axes = values[0], node.op.axes
    if x.kind != ROWS or x.axis not in axes:
        return [shards.converted(expression) for expression in moments(node.inputs[0], axes)]
    parts = shards.exchange(shards.make(lambda v: T.stack(_of_shard(v, axes)), [x], State(ROWS)), STACK)
    portions = shards.exchange(Value(shards.portion, WHOLE), STACK)

    def merged(parts, portions):
        return [T.patternbroadcast(new, old.broadcastable) for new, old in zip(_merged(parts, portions), node.outputs)]
    return shards.make_all(merged, [parts, portions], [DEPENDENT] * 2)


def _of_shard(x, axes):
    """Return a shard's mean, the error of its rounding, and the mean of the squares of the distances from it."""
    mean = x.mean(axes, keepdims=True)
    centred = x - mean
    return mean, centred.mean(axes, keepdims=True), T.sqr(centred).mean(axes, keepdims=True)


def _merged(parts, portions):
    """Return the moments of the whole batch, from the moments of each shard and its portion of the samples.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979. The means
    may be large compared with their differences, which is why their rounding counts.
    """
    means, rests, squares = parts[:, 0], parts[:, 1], parts[:, 2]
    portions = T.shape_padright(T.cast(portions, means.dtype), means.ndim - 1)
    offsets = means - means[0] + rests
    offset = (portions * offsets).sum(axis=0)
    variances = squares - T.sqr(rests) + T.sqr(offsets - offset)
    return means[0] + offset, (portions * variances).sum(axis=0)


@rule(*TRAINING)
def _training(shards, node, values):
    """Expand batch normalisation inside of a loop; around loops, `lowered` has done so before."""
    return [shards.converted(new) for new in elementary(node, node.inputs)]
