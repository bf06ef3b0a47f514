"""What is known of the rows of a variable: whether each sample has exactly one."""
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise, opt, subtensor
from theano.tensor.nnet import abstract_conv, nnet
from theano.tensor.signal.pool import Pool

from ...replicas.random_streams import DRAWS
from ..sizes import number
from ..states import rows
from .base import known

# Their output has the rows of their first input.
OF_THE_FIRST = (nnet.Softmax, nnet.SoftmaxWithBias, nnet.LogSoftmax, compile_ops.Rebroadcast, compile_ops.ViewOp,
                opt.Assert, compile_ops.SpecifyShape)
OF_IMAGES = (abstract_conv.BaseAbstractConv, Pool)  # along axis 0


def has_row_each(shards, variable, axis):
    """Whether it is certain that a variable of the given graph has one row a sample along an axis."""
    in_blocks = False  # of several batches one after the other, which have been taken apart again
    while True:
        state = shards.value(variable).state
        if state._replace(outer=None) != rows(axis) or in_blocks != (state.outer is not None):
            return False
        if variable in shards.inputs:
            return axis == 0
        node = variable.owner
        if node and isinstance(node.op, basic.Join):
            variable, in_blocks = node.inputs[1], False
            continue
        if node and isinstance(node.op, (basic.Split, subtensor.Subtensor)):
            variable, axis = node.inputs[0], axis if isinstance(node.op, basic.Split) else _axis_before(node, axis)
            in_blocks = in_blocks or shards.value(variable).state.outer is not None
            continue
        variable, axis = _source(variable, axis)
        if variable is None or in_blocks and isinstance(node.op, basic.Reshape):
            return False


def _axis_before(node, axis):
    """The axis of the input of a Subtensor that comes to lie at this one."""
    entries = subtensor.get_idx_list(node.inputs, node.op.idx_list)
    kept = [i for i in range(node.inputs[0].ndim) if i >= len(entries) or isinstance(entries[i], slice)]
    return kept[axis]


def is_made_for_each(shards, variable, axis):
    """Whether a variable has been made with a row a sample along an axis, as far as its graph shows."""
    while variable.owner:
        node = variable.owner
        if isinstance(node.op, basic.Alloc):
            return is_total(shards, node.inputs[1 + axis])
        if isinstance(node.op, subtensor.Subtensor):
            variable, axis = node.inputs[0], _axis_before(node, axis)
            entry = (list(subtensor.get_idx_list(node.inputs, node.op.idx_list)) + [slice(None)] * (axis + 1))[axis]
            if entry.stop is not None:
                return known(entry.start) in (None, 0) and is_total(shards, entry.stop)
            continue
        if isinstance(node.op, DRAWS):
            sizes = node.inputs[1].owner
            return bool(sizes) and isinstance(sizes.op, opt.MakeVector) and is_total(shards, sizes.inputs[axis])
        variable, axis = _source(variable, axis)
        if variable is None:
            return False
    return False


def is_total(shards, size):
    """Whether a variable of the given graph is the number of samples: the length of what has one row for each."""
    variable, axis = size_source(size)
    return variable is not None and has_row_each(shards, variable, axis)


def _source(variable, axis):
    """What a variable has the rows of, and along which axis; None where that is not known."""
    node = variable.owner
    if node is None:
        return None, None
    op, first = node.op, node.inputs[0] if node.inputs else None
    if isinstance(op, elemwise.Elemwise):
        return next(((v, axis) for v in node.inputs if not v.broadcastable[axis]), (None, None))
    if isinstance(op, elemwise.DimShuffle):
        return (first, op.new_order[axis]) if op.new_order[axis] != 'x' else (None, None)
    if isinstance(op, basic.Dot) and node.inputs[0].ndim == 2 and axis == 0 or isinstance(op, OF_THE_FIRST) \
            or isinstance(op, OF_IMAGES) and axis == 0:
        return first, axis
    if isinstance(op, basic.Reshape) and node.inputs[1].owner and isinstance(node.inputs[1].owner.op, opt.MakeVector):
        return size_source(node.inputs[1].owner.inputs[axis])
    return None, None


def size_source(size):
    """The variable and the axis that a size is the length of."""
    node = size.owner
    while node and isinstance(node.op, (basic.ScalarFromTensor, basic.TensorFromScalar)):
        node = node.inputs[0].owner
    if node and isinstance(node.op, compile_ops.Shape_i):
        return node.inputs[0], node.op.i
    place, vector = _entry(node)
    while place is not None and not isinstance(place, slice) and place >= 0:
        if vector.owner and isinstance(vector.owner.op, compile_ops.Shape):
            return vector.owner.inputs[0], int(place)
        part, vector = _entry(vector.owner)  # the first sizes of a shape
        if not isinstance(part, slice) or part.start not in (None, 0) or part.step not in (None, 1):
            break
    return None, None


def _entry(node):
    """What a basic index picks of a vector: a place, None if it is not known, or a slice; and the vector."""
    if not node or not isinstance(node.op, subtensor.Subtensor):
        return None, None
    entry, = subtensor.get_idx_list(node.inputs, node.op.idx_list)
    if isinstance(entry, slice):
        return slice(*[known(part) for part in (entry.start, entry.stop, entry.step)]), node.inputs[0]
    return number(entry), node.inputs[0]
