"""Batch normalisation: by the statistics of the whole batch, or of each replica's own samples."""
import theano
import theano.tensor as T
from theano.gof.graph import variables
from theano.gof.opt import copy_stack_trace
from theano.tensor.nnet import bn

from ..shards import rule
from ..states import CONSTANT, NUMBER, ROWS, WHOLE, State, partial
from .base import aligned, wholes


class Moments(theano.Op):
    """Mean and variance over axes, which are kept with a length of 1: for rules only, no function computes it."""

    __props__ = ('axes',)

    def __init__(self, axes):
        self.axes = tuple(axes)

    def make_node(self, x):
        return theano.Apply(self, [x], [v.type() for v in moments(x, self.axes)])

    def perform(self, node, inputs, storage):
        raise NotImplementedError('Moments is expanded by its rule')


def elementary(node, inputs):
    """The training of batch normalisation, or its gradient, by the statistics of the whole batch, as simpler ops."""
    if isinstance(node.op, bn.AbstractBatchNormTrain):
        made = _normalised
    else:
        made = _gradients if _are_statistics_of(node) else _gradients_at
    new = [T.patternbroadcast(T.cast(variable, old.dtype), old.broadcastable)
           for variable, old in zip(made(node.op.axes, *inputs), node.outputs)]
    for variable in set(variables(inputs, new)).difference(inputs):
        copy_stack_trace(node.outputs[0], variable)  # the user's line, for errors
    return new


def _are_statistics_of(node):
    """Whether a gradient is taken by the statistics of that by which it is taken."""
    x, mean, inverse = [node.inputs[i] for i in (0, 3, 4)]
    train = mean.owner
    return bool(train) and isinstance(train.op, bn.AbstractBatchNormTrain) and train.op.axes == node.op.axes \
        and train.inputs[0] is x and [mean, inverse] == train.outputs[1:3]


def _normalised(axes, x, scale, bias, epsilon, factor, *running):
    """As in Theano's local_abstract_batch_norm_train, but what the samples have in common is computed at once."""
    mean, variance = Moments(axes)(x)
    inverse = T.inv(T.sqrt(variance + _epsilon(epsilon, variance)))
    return [(x - mean) * (scale * inverse) + bias, mean, inverse] \
        + _running(x, scale, factor, mean, variance, *running)


def _epsilon(epsilon, variance):
    return epsilon.astype('float32') if (variance.dtype, epsilon.dtype) == ('float32', 'float64') else epsilon


def _running(x, scale, factor, mean, variance, running_mean=None, running_variance=None):
    """The new running averages, if any are kept."""
    new = []
    if running_mean is not None:
        new.append(running_mean * (1.0 - factor) + mean * factor)
    if running_variance is not None:
        m = T.cast(T.prod(x.shape) / T.prod(scale.shape), theano.config.floatX)
        new.append(running_variance * (1.0 - factor) + (m / (m - 1)) * variance * factor)
    return new


def _gradients(axes, x, dy, scale, mean, inverse, epsilon):
    """Gradients with regard to x, scale and bias.

    In Theano's local_abstract_batch_norm_train_grad a mean is computed of what another mean is part of. But `mean` is
    that of x, so the mean of ``x - mean`` is 0, and what remains are two sums of one stage.
    """
    centred = x - mean
    total, projected = dy.sum(axes, keepdims=True), (dy * centred).sum(axes, keepdims=True)
    m = T.mul(*[x.shape[axis] for axis in axes], 1).astype(x.dtype)
    dx = scale * inverse * (dy - total / m - centred * (projected / m * T.sqr(inverse)))
    return [dx, projected * inverse, total]


def _gradients_at(axes, x, dy, scale, mean, inverse, epsilon):
    """As in Theano's local_abstract_batch_norm_train_grad: with any mean."""
    centred = x - mean
    c = dy * inverse - centred * ((dy * centred).mean(axes, keepdims=True) * inverse ** 3)
    return [scale * (c - c.mean(axes, keepdims=True)), (dy * inverse * centred).sum(axes, keepdims=True),
            dy.sum(axes, keepdims=True)]


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


@rule(bn.AbstractBatchNormTrain)
def _train(shards, node, values):
    """Each shard by its own statistics; what is kept of these is their average, as by tf.distribute.MirroredStrategy.

    The average is that of means and of variances: of the inverse deviations it is the variances' that is averaged.
    """
    values = wholes(shards, values)
    x, scale, factor, epsilon = values[0], node.inputs[1], node.inputs[4], node.inputs[3]
    if shards.statistics != 'local' or x.kind != ROWS or x.axis not in node.op.axes \
            or any(value.kind == ROWS for value in values[1:]):
        return [shards.converted(new) for new in elementary(node, node.inputs)]
    y, *own = shards.make_all(node.op, values[:5], [x.state, WHOLE, WHOLE])
    shards.of_shard.update(zip(node.outputs[1:3], own))
    shards.averages.update(node.outputs[1:])
    mean, variance = node.outputs[1], node.outputs[2].type()
    shards.keep(node.outputs[0], y)

    def share_of_variance(inverse, epsilon):
        found = T.inv(T.sqr(inverse)) - _epsilon(epsilon, inverse)
        return T.maximum(found, 0) * T.cast(shards.portion, found.dtype)
    shards.keep(mean, shards.make(lambda v: v * T.cast(shards.portion, v.dtype), own[:1], partial(), like=mean))
    shards.keep(variance, shards.make(share_of_variance, [own[1], values[3]], partial(), like=variance))
    kept = [T.inv(T.sqrt(variance + _epsilon(epsilon, variance)))] \
        + _running(node.inputs[0], scale, factor, mean, variance, *node.inputs[5:])
    return [y, shards.value(mean)] + [shards.converted(T.cast(new, mean.dtype)) for new in kept]


@rule(bn.AbstractBatchNormTrainGrad)
def _train_gradients(shards, node, values):
    own = [shards.of_shard.get(variable) for variable in node.inputs[3:5]]
    if None in own:
        shards.check_averages(node, values)
        return [shards.converted(new) for new in elementary(node, node.inputs)]
    x, dy, scale, epsilon = wholes(shards, values[:3] + values[5:])
    if not _are_statistics_of(node) or ROWS in (scale.kind, epsilon.kind):
        shards.refuse(node, 'it is not the gradient of what each replica has normalised')
    (x, dy), state = aligned(shards, node, [x, dy])
    return shards.make_all(node.op, [x, dy, scale] + own + [epsilon], [state, partial(), partial()])


_train_gradients.reads_averages = True
