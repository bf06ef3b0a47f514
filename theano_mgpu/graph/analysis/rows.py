"""Facts about rows that a graph shows: how many each sample has along an axis, and whether all of them are the same."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
import theano
from theano.compile import ops as compile_ops
from theano.gof.graph import io_toposort
from theano.ifelse import IfElse
from theano.scalar import basic as scalar
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import basic, blas, elemwise, extra_ops, opt, subtensor
from theano.tensor.nnet import abstract_conv, nnet
from theano.tensor.signal.pool import Pool

from ..random_streams import DRAWS
from .known import CASTS, element, entries_of, entry_at, is_scalar_op, is_whole, number, number_everywhere, sliced_axes
from .shards import Shards
from .states import COUNT, ROWS, rows

# Ops whose output has the rows of their first input.
OF_THE_FIRST = (nnet.Softmax, nnet.SoftmaxWithBias, nnet.LogSoftmax, nnet.SoftmaxGrad, nnet.CrossentropyCategorical1Hot,
                nnet.CrossentropyCategorical1HotGrad, nnet.CrossentropySoftmaxArgmax1HotWithBias,
                compile_ops.Rebroadcast, compile_ops.ViewOp, opt.Assert, compile_ops.SpecifyShape,
                subtensor.IncSubtensor, extra_ops.CumOp, extra_ops.UnravelIndex)
OF_IMAGES = (abstract_conv.BaseAbstractConv, Pool)  # along axis 0
# Ops whose output may have other rows than their first input.
OF_OTHER_LENGTH = basic.Split, basic.Join, subtensor.AdvancedSubtensor1, IfElse
OF_SCALARS = basic.ScalarFromTensor, basic.TensorFromScalar
UNCHANGED = compile_ops.Rebroadcast, compile_ops.ViewOp, opt.Assert
DEEPEST = 100  # ops in a row that `is_uniform` looks through


def rows_of_each(shards: Shards, variable: theano.Variable, axis: int) -> tuple[Any, ...] | None:
    """Return the rows that each sample has along an axis, as a tuple of factors; None where it has no samples.

    A factor is a number, a variable, or a pair of a variable and an axis: it stands for the unknown number of rows that
    each sample has there.
    """
    if shards.value(variable).kind != ROWS or shards.value(variable).axis != axis:
        return None
    if (variable, axis) not in shards.rows_of_each:
        nodes = io_toposort([], [variable])
        for each in [*(v for node in nodes for v in node.inputs + node.outputs), variable]:  # no recursion is deep
            key = each, shards.value(each).axis
            if shards.value(each).kind == ROWS and key not in shards.rows_of_each:
                factors = _rows_of_each(shards, *key)
                shards.rows_of_each[key] = (key,) if factors is None else factors
    return shards.rows_of_each[variable, axis]


def has_row_each(shards: Shards, variable: theano.Variable, axis: int) -> bool:
    """Return whether it is certain that a variable of the given graph has one row a sample along an axis."""
    return shards.value(variable).state == rows(axis) and _is_one(rows_of_each(shards, variable, axis))


def is_total(shards: Shards, size: theano.Variable) -> bool:
    """Return whether a variable of the given graph is certain to be the number of samples."""
    return _is_one(rows_of_size(shards, size))


def _is_one(factors):
    return factors is not None and all(factor == 1 for factor in factors)


def _rows_of_each(shards, variable, axis):
    if variable in shards.inputs:
        return ()
    if variable in shards.sources:  # a variable inside of a loop
        outer, shift = shards.sources[variable]
        return rows_of_each(shards.around, outer, axis + shift)
    if variable in shards.loops:
        inside, result, _ = shards.loops[variable]
        return rows_of_each(inside, result, axis - 1)
    node = variable.owner
    if node is None:
        return None
    if isinstance(node.op, basic.Reshape):
        return rows_of_size(shards, element(node.inputs[1], axis))
    if isinstance(node.op, basic.Alloc):
        return rows_of_size(shards, node.inputs[1 + axis])
    factors = [rows_of_each(shards, *each) for each in _with_the_rows(node, variable, axis)]
    known = min((each for each in factors if each is not None), default=None,
                key=lambda each: sum(isinstance(factor, tuple) for factor in each))  # fewest unknown factors
    if isinstance(node.op, IfElse) and any(each not in (known, None) for each in factors):
        return None  # the samples of its branches may have other rows
    if known is not None and isinstance(node.op, basic.Join) and number(node.inputs[0]) in (axis, axis - variable.ndim):
        return None if factors[0] is None else factors[0] + (len(node.inputs) - 1,)
    if known is not None and isinstance(node.op, (basic.Split, subtensor.Subtensor)):
        outer = shards.value(node.inputs[0]).state.outer
        if outer is not None and shards.value(variable).state.outer is None:  # one of several blocks of samples
            return _quotient(known, outer)
    return known


def rows_of_size(shards: Shards, size: theano.Variable | None) -> tuple[Any, ...] | None:
    """Return the factors of a size but for the number of samples, as `rows_of_each`; None where they are not known."""
    if size is None or number(size) is not None or shards.value(size).state.size not in (COUNT, None):
        return None
    node = size.owner
    if node and isinstance(node.op, OF_SCALARS + (opt.Assert,)) or is_scalar_op(node, *CASTS):
        return rows_of_size(shards, node.inputs[0])
    if is_scalar_op(node, scalar.IntDiv):
        factors = rows_of_size(shards, node.inputs[0])
        return None if factors is None else _quotient(factors, node.inputs[1])
    if is_scalar_op(node, scalar.Mul):
        counts = [v for v in node.inputs if shards.value(v).state.size == COUNT]
        factors = rows_of_size(shards, counts[0]) if len(counts) == 1 else None
        return None if factors is None else factors + tuple(_factor(v) for v in node.inputs if v is not counts[0])
    shape = node.inputs[0].owner if node and isinstance(node.op, elemwise.Prod) else None
    if shape and isinstance(shape.op, compile_ops.Shape):
        x, = shape.inputs
        axis = shards.value(x).axis
        factors = rows_of_each(shards, x, axis)
        return None if factors is None else factors + tuple(_factor(x.shape[i]) for i in range(x.ndim) if i != axis)
    variable, axis = _measured(size)
    return None if variable is None else rows_of_each(shards, variable, axis)


def is_made_for_each(shards: Shards, variable: theano.Variable, axis: int) -> bool:
    """Return whether a CONSTANT has been made with a row a sample along an axis, as far as its graph shows."""
    node = variable.owner
    if node is None or isinstance(node.op, OF_OTHER_LENGTH):
        return False
    if isinstance(node.op, basic.Alloc):
        return is_total(shards, node.inputs[1 + axis])
    if isinstance(node.op, DRAWS):
        return is_total(shards, element(node.inputs[1], axis))
    if isinstance(node.op, basic.Reshape):
        size = element(node.inputs[1], axis)
        measured, place = _measured(size)
        return is_total(shards, size) or measured is not None and is_made_for_each(shards, measured, place)
    if isinstance(node.op, subtensor.Subtensor):
        entries = entries_of(node)
        entry = entry_at(entries, sliced_axes(entries, node.inputs[0].ndim)[axis])
        if entry.stop is not None:
            return entry.start in (None, 0) and isinstance(entry.stop, theano.Variable) and is_total(shards, entry.stop)
    return any(is_made_for_each(shards, *each) for each in _with_the_rows(node, variable, axis)[:1])


def takes_all(variable: theano.Variable, axis: int, stop: Any) -> bool:
    """Return whether a slice stops at the length of an axis, or at the least of several lengths, as a loop has it."""
    if not isinstance(stop, theano.Variable):
        return False
    stop = _without_scalars(stop)
    if is_scalar_op(stop.owner, scalar.Minimum):
        return any(takes_all(variable, axis, v) for v in stop.owner.inputs)
    return _measured(stop) == (variable, axis)


def is_least_count(shards: Shards, node: theano.Apply) -> bool:
    """Return whether a minimum is one of multiples of the number of samples: lengths, also of ``arange(n)``."""
    return all(shards.value(v).state.size == COUNT or _counts_places(shards, v) for v in node.inputs)


def _counts_places(shards, size):
    variable, axis = _measured(size)
    node = variable.owner if axis == 0 and variable.ndim == 1 else None
    while node and len(node.inputs) < 3 and (
            isinstance(node.op, elemwise.Elemwise)
            or isinstance(node.op, subtensor.Subtensor) and is_whole(entry_at(entries_of(node), 0))):
        node = node.inputs[0].owner
    return bool(node) and isinstance(node.op, basic.ARange) and number(node.inputs[0]) == 0 \
        and number(node.inputs[2]) == 1 and shards.value(node.inputs[1]).state.size == COUNT


def _factor(variable):
    """Return a number where it is known, else the variable without changes of its type, and each length as one."""
    value = number(variable)
    if value is not None:
        return int(value)
    node, (measured, axis) = variable.owner, _measured(variable)
    if measured is not None:
        return compile_ops.Shape_i(axis)(measured)
    return _factor(node.inputs[0]) if node and isinstance(node.op, OF_SCALARS) or is_scalar_op(node, *CASTS) \
        else variable


def _quotient(factors, divisor):
    """Return the factors without a divisor; None where it is not known that they have it."""
    divisor, whole = _factor(divisor), math.prod(each for each in factors if isinstance(each, int))
    others = [each for each in factors if not isinstance(each, int)]
    if isinstance(divisor, int):
        return tuple(others) + (whole // divisor,) if divisor > 0 and whole % divisor == 0 else None
    for i, each in enumerate(others):
        if not isinstance(each, tuple) and equal_computations([each], [divisor]):
            return tuple(others[:i] + others[i + 1:]) + (whole,)
    return None


def _with_the_rows(node, variable, axis):
    """List the inputs whose rows an output has, and along which axis; none where that is not known."""
    op, first = node.op, node.inputs[0]
    if isinstance(op, elemwise.Elemwise):
        return [(v, axis) for v in node.inputs if not v.broadcastable[axis]]
    if isinstance(op, elemwise.DimShuffle):
        return [(first, op.new_order[axis])] if op.new_order[axis] != 'x' else []
    if isinstance(op, elemwise.CAReduce):
        dropped = range(first.ndim) if op.axis is None else [each % first.ndim for each in op.axis]
        return [(first, [i for i in range(first.ndim) if i not in dropped][axis])]
    if isinstance(op, subtensor.IncSubtensor) and node.inputs[1].ndim == first.ndim and len(op.idx_list) <= axis:
        return [(first, axis), (node.inputs[1], axis)]  # the memory of a loop has the rows of its first values
    if isinstance(op, basic.Dot) and axis == first.ndim - 2 or isinstance(op, OF_IMAGES) and axis == 0 \
            or isinstance(op, OF_THE_FIRST + (basic.Split,)):
        return [(first, axis)]
    if isinstance(op, blas.BatchedDot) and axis == 0:
        return [(v, 0) for v in node.inputs]
    if isinstance(op, subtensor.AdvancedSubtensor1) and axis == 0:
        return [(node.inputs[1], 0)]
    if isinstance(op, subtensor.AdvancedSubtensor) and all(getattr(v, 'ndim', 2) < 2 for v in node.inputs[1:]) \
            and first.ndim == len(node.inputs) - 1:
        return [(v, 0) for v in node.inputs[1:] if v.ndim]
    if isinstance(op, basic.Join):
        return [(v, axis) for v in node.inputs[1:]]
    if isinstance(op, IfElse):
        return [(v, axis) for v in node.inputs[1 + node.outputs.index(variable)::len(node.outputs)]]
    if isinstance(op, subtensor.Subtensor):
        return [(first, sliced_axes(entries_of(node), first.ndim)[axis])]
    return []


def _without_scalars(variable):
    while variable.owner and isinstance(variable.owner.op, OF_SCALARS):
        variable, = variable.owner.inputs
    return variable


def _measured(size):
    """Return the variable and the axis whose length a size is."""
    node = _without_scalars(size).owner
    if node and isinstance(node.op, compile_ops.Shape_i):
        return node.inputs[0], node.op.i
    place, vector = _entry(node)
    while place is not None and not isinstance(place, slice):
        if vector.owner and isinstance(vector.owner.op, compile_ops.Shape):
            return vector.owner.inputs[0], int(place) % vector.owner.inputs[0].ndim
        if place < 0:
            break
        part, vector = _entry(vector.owner)  # the first sizes of a shape
        if not isinstance(part, slice) or part.start not in (None, 0) or part.step not in (None, 1):
            break
    return None, None


def _entry(node):
    """Return the entry of the basic index of a vector, a place, None if it is not known, or a slice; and the vector."""
    if not node or not isinstance(node.op, subtensor.Subtensor):
        return None, None
    entry, = entries_of(node)
    return None if isinstance(entry, theano.Variable) else entry, node.inputs[0]


# --- Rows that are the same for all samples, such as the number of a step that a loop counts for each -----------

def is_uniform(shards: Shards, variable: theano.Variable, axis: int,
               assumed: frozenset[tuple[theano.Variable, int]] = frozenset(), depth: int = 0) -> bool:
    """Return whether a variable of the given graph is known to be the same all along an axis.

    States of a loop are `assumed` to be the same while their next values are looked at. The `depth` counts ops that
    have been looked through.
    """
    key = variable, axis, assumed
    if key not in shards.uniform:
        shards.uniform[key] = depth < DEEPEST and _is_uniform(shards, variable, axis, assumed, depth + 1)
    return shards.uniform[key]


def _is_uniform(shards, variable, axis, assumed, depth):
    if (variable, axis) in assumed or variable.broadcastable[axis] or number_everywhere(variable) is not None:
        return True
    if isinstance(variable, theano.Constant):
        return bool(np.all(variable.data == np.take(variable.data, [0], axis)))
    if variable in shards.sources:
        outer, shift = shards.sources[variable]
        return is_uniform(shards.around, outer, axis + shift, depth=depth)
    if variable in shards.recurrences:
        first, following = shards.recurrences[variable]
        assumed = assumed.union([(variable, axis)])
        return is_uniform(shards.around, first, axis + 1, depth=depth) and \
            all(is_uniform(shards, v, axis, assumed, depth) for v in following)
    if variable in shards.loops:
        inside, result, first = shards.loops[variable]
        return axis > 0 and is_uniform(inside, result, axis - 1, depth=depth) \
            and (first is None or is_uniform(shards, first, axis, depth=depth))
    sources = _sources(variable.owner, axis) if variable.owner else None
    return sources is not None and all(is_uniform(shards, v, each, assumed, depth) for v, each in sources)


def _sources(node, axis):
    """List the variables that must be the same along which axis, if an output is to be; None where not known."""
    op, first = node.op, node.inputs[0] if node.inputs else None
    if isinstance(op, elemwise.Elemwise):
        return [(v, axis) for v in node.inputs[is_scalar_op(node, scalar.Second):]]
    if isinstance(op, (elemwise.DimShuffle, subtensor.Subtensor) + UNCHANGED):
        return _with_the_rows(node, node.outputs[0], axis)
    if isinstance(op, basic.Alloc):
        own = axis - (node.outputs[0].ndim - first.ndim)
        return [(first, own)] if own >= 0 else []
    if isinstance(op, subtensor.IncSubtensor) and op.set_instead_of_inc and first.owner \
            and isinstance(first.owner.op, basic.AllocEmpty) and len(op.idx_list) <= axis \
            and node.inputs[1].ndim == first.ndim:
        return [(node.inputs[1], axis)]  # the first values of a loop, ahead of the memory for its results
    return None
