"""How many rows each sample has along an axis, where a graph says so."""
import theano
from theano.gof.graph import io_toposort
from theano.ifelse import IfElse
from theano.scalar import basic as scalar
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import basic, blas, elemwise, extra_ops, opt, subtensor

from ..sizes import length_of, number
from ..states import COUNT, ROWS
from .base import known
from .rows import OF_IMAGES, OF_THE_FIRST, size_source

CASTS = scalar.Cast, scalar.Identity


def rows_of_each(shards, variable, axis):
    """Return the rows that each sample has along an axis, as a tuple of factors; None where it has no samples.

    Parameters
    ----------
    shards : Shards
    variable : theano.Variable
        Of the given graph.
    axis : int

    Returns
    -------
    tuple of (int, theano.Variable, or (theano.Variable, int)), or None
        The last kind stands for the unknown number of rows that each sample has in a variable along an axis.
    """
    if shards.value(variable).kind != ROWS or shards.value(variable).axis != axis:
        return None
    if (variable, axis) not in shards.rows_of_each:
        for node in io_toposort([], [variable]):  # one after the other, however deep the graph is
            for each in node.inputs + node.outputs:
                _find_out(shards, each)
        _find_out(shards, variable)
    return shards.rows_of_each[variable, axis]


def _find_out(shards, variable):
    value = shards.value(variable)
    key = variable, value.axis
    if value.kind == ROWS and key not in shards.rows_of_each:
        found = _rows_of_each(shards, *key)
        shards.rows_of_each[key] = (key,) if found is None else found


def _rows_of_each(shards, variable, axis):
    if variable in shards.inputs:
        return ()
    if variable in shards.sources:  # of a loop
        outer, shift = shards.sources[variable]
        return rows_of_each(shards.around, outer, axis + shift)
    if variable in shards.loops:
        inside, result, _ = shards.loops[variable]
        return rows_of_each(inside, result, axis - 1)
    node = variable.owner
    if node is None:
        return None
    if isinstance(node.op, basic.Reshape):
        return rows_of_size(shards, _element(node.inputs[1], axis))
    if isinstance(node.op, basic.Alloc):
        return rows_of_size(shards, node.inputs[1 + axis])
    if isinstance(node.op, basic.Join) and number(node.inputs[0]) in (axis, axis - variable.ndim):
        found = rows_of_each(shards, node.inputs[1], axis)
        return None if found is None else found + (len(node.inputs) - 1,)
    found = [rows_of_each(shards, *each) for each in _with_the_rows(shards, variable, axis)]
    return min((rows for rows in found if rows is not None), key=_n_unknown, default=None)


def _n_unknown(factors):
    return sum(isinstance(each, tuple) for each in factors)


def rows_of_size(shards, size):
    """Return the factors of a size but for the number of samples, as `rows_of_each`; None where they are not known."""
    if size is None or number(size) is not None or shards.value(size).state.size not in (COUNT, None):
        return None
    node = size.owner
    if node and isinstance(node.op, (basic.ScalarFromTensor, basic.TensorFromScalar, opt.Assert)):
        return rows_of_size(shards, node.inputs[0])
    if node and isinstance(node.op, elemwise.Elemwise):
        op = node.op.scalar_op
        if isinstance(op, CASTS):
            return rows_of_size(shards, node.inputs[0])
        if isinstance(op, scalar.IntDiv):
            found = rows_of_size(shards, node.inputs[0])
            return None if found is None else _quotient(found, node.inputs[1])
        if isinstance(op, scalar.Mul):
            counts = [v for v in node.inputs if shards.value(v).state.size == COUNT]
            found = rows_of_size(shards, counts[0]) if len(counts) == 1 else None
            return None if found is None else found + tuple(_factor(v) for v in node.inputs if v is not counts[0])
        return None
    variable, axis = size_source(size)
    return None if variable is None else rows_of_each(shards, variable, axis)


def takes_all(variable, axis, stop):
    """Return whether a slice stops at the length of an axis, or at the least of several lengths, as a loop has it."""
    if not isinstance(stop, theano.Variable):
        return False
    node = stop.owner
    while node and isinstance(node.op, (basic.ScalarFromTensor, basic.TensorFromScalar)):
        stop, node = node.inputs[0], node.inputs[0].owner
    if node and isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, scalar.Minimum):
        return any(takes_all(variable, axis, v) for v in node.inputs)
    return size_source(stop) == (variable, axis)


def is_least_count(shards, node):
    """Return whether a minimum is one of multiples of the number of samples: lengths, also of ``arange(n)``."""
    return all(shards.value(v).state.size == COUNT or _counts_places(shards, v) for v in node.inputs)


def _counts_places(shards, size):
    variable, axis = size_source(size)
    node = variable.owner if axis == 0 and variable.ndim == 1 else None
    while node and isinstance(node.op, (subtensor.Subtensor, elemwise.Elemwise)) and len(node.inputs) < 3 \
            and (isinstance(node.op, elemwise.Elemwise) or _indexed(node, 0)):
        node = node.inputs[0].owner
    return bool(node) and isinstance(node.op, basic.ARange) and number(node.inputs[0]) == 0 \
        and number(node.inputs[2]) == 1 and shards.value(node.inputs[1]).state.size == COUNT


def is_quotient_of_rows(shards, node):
    """Return whether a division of a multiple of the number of samples leaves one, whatever their number."""
    found = rows_of_size(shards, node.inputs[0])
    return found is not None and _quotient(found, node.inputs[1]) is not None


def _factor(variable):
    """A number where it is known, else the variable without changes of its type."""
    found = number(variable)
    if found is not None:
        return int(found)
    node = variable.owner
    if node and (isinstance(node.op, (basic.ScalarFromTensor, basic.TensorFromScalar)) or isinstance(
            node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, CASTS)):
        return _factor(node.inputs[0])
    return variable


def _quotient(factors, divisor):
    """The factors without a divisor; None where it is not known that they have it."""
    divisor = divisor if isinstance(divisor, int) else _factor(divisor)
    whole = 1
    for each in factors:
        whole *= each if isinstance(each, int) else 1
    others = [each for each in factors if not isinstance(each, int)]
    if isinstance(divisor, int):
        return tuple(others) + (whole // divisor,) if divisor > 0 and whole % divisor == 0 else None
    for i, each in enumerate(others):
        if not isinstance(each, tuple) and equal_computations([each], [divisor]):
            return tuple(others[:i] + others[i + 1:]) + (whole,)
    return None


def _element(vector, place):
    """An element of a vector of sizes as a variable of the given graph; None where it is not known."""
    node = vector.owner
    if node and isinstance(node.op, opt.MakeVector):
        return node.inputs[place]
    if node and isinstance(node.op, basic.Join):
        for piece in node.inputs[1:]:
            length = length_of(piece)
            if length is None:
                return None
            if place < length:
                return _element(piece, place)
            place -= length
        return None
    if node and isinstance(node.op, elemwise.DimShuffle) and node.op.new_order == ('x',):
        return node.inputs[0]
    if node and isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, CASTS):
        return _element(node.inputs[0], place)
    return vector[place] if node else None


def _with_the_rows(shards, variable, axis):
    """The inputs of a node that its output has the rows of, and along which axis; none where that is not known."""
    node = variable.owner
    op, first = node.op, node.inputs[0]
    if isinstance(op, elemwise.Elemwise):
        return [(v, axis) for v in node.inputs if shards.value(v).kind == ROWS and not v.broadcastable[axis]]
    if isinstance(op, elemwise.DimShuffle):
        return [(first, op.new_order[axis])] if op.new_order[axis] != 'x' else []
    if isinstance(op, elemwise.CAReduce):
        dropped = range(first.ndim) if op.axis is None else [each % first.ndim for each in op.axis]
        return [(first, [i for i in range(first.ndim) if i not in dropped][axis])]
    if isinstance(op, basic.Dot) and axis == first.ndim - 2 or isinstance(op, OF_THE_FIRST) \
            or isinstance(op, OF_IMAGES) and axis == 0:
        return [(first, axis)]
    if isinstance(op, (blas.BatchedDot, subtensor.AdvancedSubtensor1)) and axis == 0:
        return [(v, 0) for v in node.inputs if shards.value(v).kind == ROWS]
    if isinstance(op, basic.Join):
        return [(v, axis) for v in node.inputs[1:] if shards.value(v).kind == ROWS]
    if isinstance(op, IfElse):
        branches = node.inputs[1 + node.outputs.index(variable)::len(node.outputs)]
        return [(v, axis) for v in branches if shards.value(v).kind == ROWS]
    if isinstance(op, subtensor.Subtensor):
        return _indexed(node, axis)
    if isinstance(op, (subtensor.IncSubtensor, extra_ops.CumOp)):
        return [(first, axis)]
    return []


def _indexed(node, axis):
    """The input of a basic index, and the axis of it that is whole and lies there in the output; none of another."""
    entries = subtensor.get_idx_list(node.inputs, node.op.idx_list)
    kept = [i for i in range(node.inputs[0].ndim) if i >= len(entries) or isinstance(entries[i], slice)]
    entry = entries[kept[axis]] if kept[axis] < len(entries) else slice(None)
    is_all = known(entry.start) in (None, 0) and known(entry.stop) is None and known(entry.step) in (None, 1)
    return [(node.inputs[0], kept[axis])] if is_all else []
