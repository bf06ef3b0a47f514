"""Elementwise ops, and others that treat each element by itself."""
import theano.tensor as T
from theano import sparse
from theano.compile import ops as compile_ops
from theano.gradient import DisconnectedGrad, GradClip, ZeroGrad
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops, opt
from theano.tensor.nnet import bn

from ..known import is_scalar_op, is_zero
from ..reductions import MAX, MIN, SUM
from ..rows import is_least_count, rows_of_size
from ..shards import rule
from ..states import CONSTANT, COUNT, NUMBER, PARTIAL, ROWS, State, has_rows, partial
from .base import aligned, all_rows, only_rows_on, refuse_rows, same_rows, shares_of, widens

LINEAR = scalar.Add, scalar.Sub, scalar.Neg, scalar.Identity, scalar.Cast
OPPOSITE = {MAX: MIN, MIN: MAX}
DIMENSIONS = 'its dimensions are samples'


@rule(compile_ops.Rebroadcast)
def _rebroadcast(shards, node, values):
    x, = values
    if node.op.axis.get(x.axis):  # it checks that this length is 1
        x = shards.make(lambda v: shards.check(node, 'there is more than one sample', v, T.eq(
            shards.whole_length(v, x.axis), 1)), values, x.state)
    return shards.apply(node, [x], x.state)


@rule(compile_ops.ViewOp, compile_ops.DeepCopyOp, DisconnectedGrad, GradClip, ZeroGrad, extra_ops.CpuContiguous,
      basic.ScalarFromTensor, basic.TensorFromScalar, sparse.DenseFromSparse, sparse.SparseFromDense)
def _same(shards, node, values):
    return shards.apply(node, values, values[0].state)


@rule(sparse.AddSS, sparse.AddSSData, sparse.AddSD, sparse.MulSS, sparse.MulSD, sparse.Neg, sparse.Cast,
      sparse.Remove0, sparse.EnsureSortedIndices, sparse.HStack, of=ROWS)
def _of_sparse(shards, node, values):
    """Return matrices of samples combined element by element, or joined along the other axis: none is broadcast."""
    axis = {sparse.HStack: 0, sparse.VStack: 1}.get(type(node.op), same_rows(shards, node, values).axis)
    state = only_rows_on(shards, node, values, axis)
    matrices = [value for value in values if value.variable.ndim == 2]  # before numbers
    return shards.apply(node, all_rows(shards, matrices, axis) + values[len(matrices):], state)


@rule(opt.Assert)
def _checked(shards, node, values):
    # For a condition on all samples, each replica checks its own samples.
    conditions = [value if value.state.reduction == MIN and value.variable.dtype == 'bool' else shards.whole(value)
                  for value in values[1:]]
    return shards.apply(node, values[:1] + conditions, values[0].state)


@rule(bn.AbstractBatchNormInference, of=ROWS)
def _normalised_by_constants(shards, node, values):
    refuse_rows(shards, node, values[1:], 'its statistics belong to single samples')
    operands, state = aligned(shards, node, values[:5])
    return shards.apply(node, operands + values[5:], state)


@rule(extra_ops.UnravelIndex, of=ROWS)
def _coordinates(shards, node, values):
    refuse_rows(shards, node, values[1:], DIMENSIONS)
    return shards.apply(node, values, values[0].state)


@rule(extra_ops.RavelMultiIndex, of=ROWS)
def _raveled(shards, node, values):
    refuse_rows(shards, node, values[-1:], DIMENSIONS)
    # NumPy would broadcast along new axes on the left, where `aligned` expects none.
    if any(v.ndim not in (0, node.outputs[0].ndim) for v in node.inputs[:-1]):
        shards.refuse(node, 'its indices do not have as many axes as its output')
    indices, state = aligned(shards, node, values[:-1])
    return shards.apply(node, indices + values[-1:], state)


@rule(elemwise.Elemwise, of=CONSTANT, compares_lengths=True)
def _elemwise(shards, node, values):
    sizes = [value.state.size for value in values]
    if is_scalar_op(node, scalar.Second):
        return _filled(shards, node, values)
    if is_scalar_op(node, scalar.IntDiv) and sizes[0] == COUNT and values[1].kind == CONSTANT \
            and rows_of_size(shards, node.outputs[0]) is not None \
            or is_scalar_op(node, scalar.Minimum) and set(sizes) == {COUNT, NUMBER} and node.outputs[0].ndim == 0 \
            and is_least_count(shards, node):
        return shards.apply(node, values, State(CONSTANT, size=COUNT))
    if _stays_partial(shards, node, values):
        return shards.apply(node, values, partial())
    if is_scalar_op(node, scalar.Neg) and values[0].state.reduction in OPPOSITE \
            and node.outputs[0].dtype.startswith('float'):
        return shards.apply(node, values, partial(OPPOSITE[values[0].state.reduction]))
    values = shards.wholes(values)
    if not has_rows(values):
        return shards.constant(node, values)
    values, state = aligned(shards, node, values)
    return shards.apply(node, values, state)


def _filled(shards, node, values):
    """Return the Value of the second input in the shape of the first."""
    like, value = values
    if node.outputs[0].ndim == 0:
        return [value]
    # The first input only gives its shape, and a share of a sum has the shape of the sum.
    like = shards.shaped_like(like)
    if not has_rows([like, value]):
        if value.kind == PARTIAL and (value.state.reduction != SUM or _grows(node, 1)):
            value = shards.whole(value)
        return shards.apply(node, [like, value], value.state)
    values, state = aligned(shards, node, shards.wholes([like, value]))
    return shards.apply(node, values, state)


def _grows(node, i):
    """Return whether an input is broadcast: its share is less to exchange than the share of the output."""
    return node.inputs[i].type.broadcastable != node.outputs[0].type.broadcastable


def _stays_partial(shards, node, values):
    """Return whether the output is a sum over replicas as its inputs are, which need not be exchanged yet."""
    shares = shares_of(values)
    if not shares or has_rows(values) or any(
            values[i].state.reduction != SUM or _grows(node, i) or not widens(node, i) for i in shares):
        return False
    stages = [shards.stage(value.variable) for value in values]
    if max(stages) > min(stages[i] for i in shares):
        return False  # the sum has been exchanged by that stage
    if is_scalar_op(node, *LINEAR):
        return all(value.kind == PARTIAL or is_zero(v) for value, v in zip(values, node.inputs))
    return is_scalar_op(node, scalar.Mul) and len(shares) == 1 or is_scalar_op(node, scalar.TrueDiv) and shares == [0]
