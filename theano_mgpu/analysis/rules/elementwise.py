"""Elementwise ops."""
import theano
from theano import sparse
from theano.compile import ops as compile_ops
from theano.gradient import DisconnectedGrad, GradClip, ZeroGrad
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, io, opt
from theano.tensor.nnet import bn

from ..reductions import MAX, MIN, SUM
from ..shards import rule
from ..states import CONSTANT, COUNT, NUMBER, PARTIAL, ROWS, State, partial
from .base import aligned, is_zero, wholes, widens
from .counts import is_least_count, is_quotient_of_rows

LINEAR = (scalar.Add, scalar.Sub, scalar.Neg, scalar.Identity, scalar.Cast)
OPPOSITE = {MAX: MIN, MIN: MAX}


@rule(compile_ops.Rebroadcast, compile_ops.ViewOp, compile_ops.DeepCopyOp, DisconnectedGrad, GradClip, ZeroGrad,
      basic.ScalarFromTensor, basic.TensorFromScalar, sparse.DenseFromSparse, sparse.SparseFromDense)
def _same(shards, node, values):
    return shards.apply(node, values, values[0].state)


@rule(sparse.Transpose)
def _transposed(shards, node, values):
    state = values[0].state
    return shards.apply(node, values, state._replace(axis=1 - state.axis) if values[0].kind == ROWS else state)


@rule(theano.printing.Print)
def _printed(shards, node, values):
    # `graphs.prints` takes those of the graph itself away; one in a loop prints in the middle of a stage.
    shards.refuse(node, 'what a loop prints would be the part of a replica')


_printed.for_constants = True


@rule(io.MPIRecv, io.MPIRecvWait, io.MPISend, io.MPISendWait)
def _messages(shards, node, values):
    shards.refuse(node, 'each replica would send or receive')


_messages.for_constants = True


@rule(opt.Assert)
def _checked(shards, node, values):
    # Where each replica's samples must meet a condition, each replica checks its own.
    conditions = [value if value.state.reduction == MIN and value.variable.dtype == 'bool' else shards.whole(value)
                  for value in values[1:]]
    return shards.apply(node, values[:1] + conditions, values[0].state)


@rule(bn.AbstractBatchNormInference)
def _normalised_by_constants(shards, node, values):
    values = wholes(shards, values)
    if any(value.kind == ROWS for value in values[1:]):
        shards.refuse(node, 'its statistics belong to single samples')
    given, state = aligned(shards, node, values[:5]) if values[0].kind == ROWS else (values[:5], values[0].state)
    return shards.apply(node, given + values[5:], state)


@rule(elemwise.Elemwise)
def _elemwise(shards, node, values):
    if isinstance(node.op.scalar_op, scalar.Second):
        return _filled(shards, node, values)
    if isinstance(node.op.scalar_op, scalar.IntDiv) and values[0].state.size == COUNT and values[1].kind == CONSTANT \
            and is_quotient_of_rows(shards, node):
        return shards.apply(node, values, State(CONSTANT, size=COUNT))
    if isinstance(node.op.scalar_op, scalar.Minimum) and {value.state.size for value in values} == {COUNT, NUMBER} \
            and node.outputs[0].ndim == 0 and is_least_count(shards, node):
        return shards.apply(node, values, State(CONSTANT, size=COUNT))
    if _stays_partial(shards, node, values):
        return shards.apply(node, values, partial())
    if isinstance(node.op.scalar_op, scalar.Neg) and values[0].state.reduction in OPPOSITE \
            and node.outputs[0].dtype.startswith('float'):
        return shards.apply(node, values, partial(OPPOSITE[values[0].state.reduction]))
    values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    values, state = aligned(shards, node, values)
    return shards.apply(node, values, state)


_elemwise.for_constants = True


def _filled(shards, node, values):
    """The second input, in the shape of the first."""
    like, value = values
    if node.outputs[0].ndim == 0:
        return [value]
    # Of the first, only the shape is needed, and a share of a sum has that of the sum.
    like = shards.shaped_like(like)
    if like.kind != ROWS and value.kind != ROWS:
        if value.kind == PARTIAL and (value.state.reduction != SUM or _grows(node, 1)):
            value = shards.whole(value)
        return shards.apply(node, [like, value], value.state)
    values, state = aligned(shards, node, [like] + wholes(shards, [value]))
    return shards.apply(node, values, state)


def _grows(node, i):
    """Whether an input is broadcast: a share of it is less to exchange than one of the output."""
    return node.inputs[i].type.broadcastable != node.outputs[0].type.broadcastable


def _stays_partial(shards, node, values):
    """Whether the output is a sum over replicas as its inputs are, which need not be exchanged yet."""
    shares = [i for i, value in enumerate(values) if value.kind == PARTIAL]
    op, kinds = node.op.scalar_op, {value.kind for value in values}
    if not shares or ROWS in kinds or any(values[i].state.reduction != SUM or _grows(node, i) for i in shares):
        return False
    if max(value.stage for value in values) > min(values[i].stage for i in shares):
        return False  # by then its sum can be had for nothing
    if not all(widens(node, i) for i in shares):
        return False
    zero = [value.kind == PARTIAL or is_zero(v) for value, v in zip(values, node.inputs)]
    if isinstance(op, LINEAR):
        return all(zero)
    if isinstance(op, scalar.Mul):
        return len(shares) == 1
    return isinstance(op, scalar.TrueDiv) and shares == [0]
