"""The graph that is analysed: without duplicates, and batch normalisation as simpler ops, which have rules."""
import theano
import theano.tensor as T
from theano.gof.graph import io_toposort, variables
from theano.gof.opt import copy_stack_trace
from theano.ifelse import IfElse
from theano.tensor.nnet import bn

from ..analysis.rules.batch_norm import Moments
from ..analysis.sizes import number


def lowered(outputs):
    """A copy of a graph in which the training of batch normalisation is simpler ops, and no node stands twice.

    What stands twice would be exchanged, and carried from stage to stage, twice. Of a branch whose condition is a
    known number, nothing remains.
    """
    outputs = _rebuilt(list(outputs), _elementary)
    merged, constants = {}, {}

    def only_once(node, inputs):
        inputs = [constants.setdefault(v.signature(), v) if isinstance(v, theano.Constant) else v for v in inputs]
        first = merged.get((node.op, tuple(inputs)))
        if first is not None and [v.type for v in first.outputs] == [v.type for v in node.outputs]:
            return first.outputs
        new = node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
        merged[node.op, tuple(inputs)] = new[0].owner
        return new
    return _rebuilt(outputs, only_once)


def _rebuilt(outputs, rebuild):
    found = {}
    for node in io_toposort([], outputs):
        found.update(zip(node.outputs, rebuild(node, [found.get(variable, variable) for variable in node.inputs])))
    return [found.get(output, output) for output in outputs]


def _elementary(node, inputs):
    if isinstance(node.op, IfElse) and number(inputs[0]) is not None:  # as Keras's learning phase may be
        n = len(node.outputs)
        return inputs[1:n + 1] if number(inputs[0]) else inputs[n + 1:]
    if type(node.op) not in LOWERED:
        return node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
    new = LOWERED[type(node.op)](node.op.axes, *inputs)
    new = [T.patternbroadcast(variable, old.broadcastable) for variable, old in zip(new, node.outputs)]
    for variable in set(variables(inputs, new)).difference(inputs):
        copy_stack_trace(node.outputs[0], variable)  # the user's line, for errors
    return new


def _normalised(axes, x, scale, bias, epsilon, factor, running_mean=None, running_variance=None):
    """As in Theano's local_abstract_batch_norm_train, but what the samples have in common is computed at once."""
    mean, variance = Moments(axes)(x)
    if variance.dtype == 'float32' and epsilon.dtype == 'float64':
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
    """Gradients with regard to x, scale and bias.

    In Theano's local_abstract_batch_norm_train_grad a mean is computed of what another mean is part of. But `mean` is
    that of x, so the mean of ``x - mean`` is 0, and what remains are two sums of one stage.
    """
    centred = x - mean
    total, projected = dy.sum(axes, keepdims=True), (dy * centred).sum(axes, keepdims=True)
    m = T.mul(*[x.shape[axis] for axis in axes], 1).astype(x.dtype)
    dx = scale * inverse * (dy - total / m - centred * (projected / m * T.sqr(inverse)))
    return [dx, projected * inverse, total]


LOWERED = {bn.AbstractBatchNormTrain: _normalised, bn.AbstractBatchNormTrainGrad: _gradients}
