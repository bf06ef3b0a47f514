"""Reductions, and ops that go along an axis."""
import theano.tensor as T
from theano import sparse
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops
from theano.tensor.nnet import nnet
from theano.tensor.sort import ArgSortOp, SortOp, TopKOp

from ..known import number, number_everywhere
from ..reductions import MAX, MIN, PROD, SUM
from ..shards import refusal_of, rule
from ..states import PARTIAL, REFUSED, ROWS, State, Value, has_rows, partial
from .base import OTHER_AXIS, aligned, refuse_rows, same_rows, widens

# No MulWithoutZeros, of the gradient of a product: a part may have zeros alone, whose product would count as zero.
REDUCTION = {scalar.Add: SUM, scalar.Mul: PROD, scalar.Maximum: MAX, scalar.Minimum: MIN, scalar.OR: MAX,
             scalar.AND: MIN}
NO_PLACE = 'the place of the maximum among all samples is not known to a replica'


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
        reduction = None  # it combines the bits of integers
    if value.kind == PARTIAL:
        if reduction == value.state.reduction == SUM and widens(node):
            return shards.apply(node, values, value.state)
        return shards.constant(node, shards.wholes(values))
    if value.axis not in axes:
        return shards.apply(node, values, _without(value.state, axes))
    if reduction is None:
        shards.refuse(node, 'it reduces over the samples')
    if reduction == SUM and number_everywhere(node.inputs[0]) is not None:
        return _counted(shards, node, axes)
    return shards.apply(node, values, partial(reduction))


def _counted(shards, node, axes):
    """Return the Value of a sum of one number over all samples, as of ``ones_like(x)``: it needs no exchange."""
    (x,), output = node.inputs, node.outputs[0]
    total = T.cast(T.mul(number_everywhere(x), *[x.shape[i] for i in axes]), output.dtype)
    others = [x.shape[i] for i in range(x.ndim) if i not in axes]
    return [shards.converted(T.alloc(total, *others) if others else total)]


@rule(sparse.SpSum, of=ROWS)
def _sum_of_sparse(shards, node, values):
    state = values[0].state
    return shards.apply(node, values, partial() if node.op.axis in (None, state.axis) else state._replace(axis=0))


@rule(basic.MaxAndArgmax, basic.Argmax, of=ROWS)
def _argmax(shards, node, values):
    value, axes = values[0], _axes(node)
    if value.axis not in axes:
        return shards.apply(node, values, _without(value.state, axes))
    place = State(REFUSED, reason=refusal_of(node, NO_PLACE))
    highest = [] if isinstance(node.op, basic.Argmax) else shards.apply(node, values, partial(MAX))[:1]
    return highest + [Value(None, place)]


@rule(extra_ops.CumOp, extra_ops.DiffOp, SortOp, ArgSortOp, TopKOp, of=ROWS)
def _along_axis(shards, node, values):
    axis = getattr(node.op, 'axis', None)
    if axis is None and len(node.inputs) > 1:
        axis = number(node.inputs[1])
    if has_rows(values[1:]) or axis is None or int(axis) % node.inputs[0].ndim == values[0].axis:
        shards.refuse(node, 'it goes along the samples')
    return shards.apply(node, values, values[0].state)


@rule(nnet.Softmax, nnet.LogSoftmax, of=ROWS)
def _softmax(shards, node, values):
    x = node.inputs[0]
    if values[0].axis < x.ndim - 1:
        return shards.apply(node, values, values[0].state)
    # A softmax over the samples becomes elementary ops, which have rules.
    shifted = x - basic.max(x, axis=-1, keepdims=True)
    total = T.exp(shifted).sum(axis=-1, keepdims=True)
    return [shards.converted(shifted - T.log(total) if isinstance(node.op, nnet.LogSoftmax) else
                             T.exp(shifted) / total)]


@rule(nnet.SoftmaxWithBias)
def _softmax_with_bias(shards, node, values):
    return [shards.converted(T.nnet.softmax(node.inputs[0] + node.inputs[1]))]


@rule(nnet.SoftmaxGrad, of=ROWS)
def _softmax_gradient(shards, node, values):
    if all(value.kind != ROWS or value.axis == 0 for value in values):
        values, state = aligned(shards, node, values)
        return shards.apply(node, values, state)  # Theano knows how to compute it with the cross-entropy
    dy, sm = node.inputs
    product = dy * sm
    return [shards.converted(product - product.sum(axis=-1, keepdims=True) * sm)]


@rule(nnet.CrossentropyCategorical1Hot, nnet.CrossentropyCategorical1HotGrad,
      nnet.CrossentropySoftmaxArgmax1HotWithBias, of=ROWS)
def _crossentropy(shards, node, values):
    bias = values[1:2] if isinstance(node.op, nnet.CrossentropySoftmaxArgmax1HotWithBias) else []
    others = values[:1] + values[1 + len(bias):]  # a bias belongs to no sample
    if same_rows(shards, node, others).axis != 0:
        shards.refuse(node, OTHER_AXIS % 0)
    others, state = aligned(shards, node, others)
    refuse_rows(shards, node, bias, 'its bias belongs to single samples')
    return shards.apply(node, others[:1] + bias + others[1:], state)
