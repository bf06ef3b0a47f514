"""Reductions, and what goes along an axis."""
import theano.tensor as T
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops
from theano.tensor.sort import ArgSortOp, SortOp, TopKOp

from ..reductions import MAX, MIN, PROD, SUM
from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, FREE, NUMBER, PARTIAL, REFUSED, ROWS, State, Value, partial
from .base import aligned, number_everywhere, rows_along, wholes, widens
from .shapes import whole_length

REDUCTION = {scalar.Add: SUM, scalar.Mul: PROD, elemwise.MulWithoutZeros: PROD, scalar.Maximum: MAX,
             scalar.Minimum: MIN, scalar.OR: MAX, scalar.AND: MIN}


def _axes(node):
    ndim, axis = node.inputs[0].ndim, node.op.axis
    return list(range(ndim)) if axis is None else [each % ndim for each in axis] if ndim else []


def _without(state, axes):
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in axes))


@rule(elemwise.CAReduce)
def _reduce(shards, node, values):
    value, axes = values[0], _axes(node)
    reduction = REDUCTION.get(type(node.op.scalar_op))
    if isinstance(node.op.scalar_op, (scalar.OR, scalar.AND)) and node.inputs[0].dtype != 'bool':
        reduction = None  # of the bits of numbers
    if value.kind == PARTIAL:
        if reduction == value.state.reduction == SUM and widens(node):
            return shards.apply(node, values, value.state)
        return shards.constant(node, wholes(shards, values))
    if value.axis not in axes:
        return shards.apply(node, values, _without(value.state, axes))
    if reduction is None:
        shards.refuse(node, 'it reduces over the samples')
    if reduction == SUM and number_everywhere(node.inputs[0]) is not None:
        return _counted(shards, node, value, axes)
    return shards.apply(node, values, partial(reduction))


def _counted(shards, node, value, axes):
    """A sum of one number over all samples, such as ``ones_like(x).sum()``: nothing need be exchanged for it."""
    output = node.outputs[0]

    def counted(x):
        lengths = [whole_length(shards, x, i) if i == value.axis else x.shape[i] for i in range(x.ndim)]
        total = T.cast(T.mul(number_everywhere(node.inputs[0]), *[lengths[i] for i in axes]), output.dtype)
        return T.alloc(total, *[lengths[i] for i in range(x.ndim) if i not in axes]) if output.ndim else total
    return [shards.make(counted, [shards.shaped_like(value)], State(CONSTANT, size=NUMBER), like=output)]


@rule(basic.MaxAndArgmax, basic.Argmax)
def _argmax(shards, node, values):
    value, axes = values[0], _axes(node)
    if value.kind == PARTIAL:
        return shards.constant(node, wholes(shards, values))
    if value.axis not in axes:
        return shards.apply(node, values, _without(value.state, axes))
    place = State(REFUSED, reason='%s: the place of the maximum among all samples is not known to a replica' % node)
    if isinstance(node.op, basic.Argmax):
        return [Value(None, place, FREE)]
    highest, _ = shards.apply(node, values, partial(MAX))
    return [highest, Value(None, place, FREE)]


@rule(extra_ops.CumOp, extra_ops.DiffOp, SortOp, ArgSortOp, TopKOp)
def _along_axis(shards, node, values):
    values = wholes(shards, values)
    axis = getattr(node.op, 'axis', None)
    if axis is None and len(node.inputs) > 1:
        axis = number(node.inputs[1])
    if values[0].kind != ROWS:
        return shards.constant(node, values)
    if axis is None or int(axis) % node.inputs[0].ndim == values[0].axis:
        shards.refuse(node, 'it goes along the samples')
    return shards.apply(node, values, values[0].state)


@rule(T.nnet.nnet.Softmax, T.nnet.nnet.LogSoftmax)
def _softmax(shards, node, values):
    values = wholes(shards, values)
    value = values[0]
    if value.kind != ROWS:
        return shards.constant(node, values)
    if value.axis < node.inputs[0].ndim - 1:
        return shards.apply(node, values, value.state)
    # Over the samples: as elementary ops, which have rules.
    x = node.inputs[0]
    shifted = x - basic.max(x, axis=-1, keepdims=True)
    total = T.exp(shifted).sum(axis=-1, keepdims=True)
    logs = isinstance(node.op, T.nnet.nnet.LogSoftmax)
    return [shards.converted(shifted - T.log(total) if logs else T.exp(shifted) / total)]


@rule(T.nnet.nnet.SoftmaxWithBias)
def _softmax_with_bias(shards, node, values):
    x, bias = node.inputs
    return [shards.converted(T.nnet.softmax(x + bias))]


@rule(T.nnet.nnet.SoftmaxGrad)
def _softmax_gradient(shards, node, values):
    values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    if all(value.kind != ROWS or value.axis == 0 for value in values):
        values, state = aligned(shards, node, values)
        return shards.apply(node, values, state)  # Theano knows how to compute it with the cross-entropy
    dy, sm = node.inputs
    product = dy * sm
    return [shards.converted(product - product.sum(axis=-1, keepdims=True) * sm)]


@rule(T.nnet.nnet.CrossentropyCategorical1Hot, T.nnet.nnet.CrossentropyCategorical1HotGrad,
      T.nnet.nnet.CrossentropySoftmaxArgmax1HotWithBias)
def _crossentropy(shards, node, values):
    values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    bias = isinstance(node.op, T.nnet.nnet.CrossentropySoftmaxArgmax1HotWithBias)
    given = [values[0], values[2]] if bias else values  # a bias belongs to no sample
    rows_along(shards, node, given, 0)
    cut, state = aligned(shards, node, given)
    if bias and values[1].kind == ROWS:
        shards.refuse(node, 'its bias belongs to single samples')
    return shards.apply(node, [cut[0], values[1], cut[1]] if bias else cut, state)
