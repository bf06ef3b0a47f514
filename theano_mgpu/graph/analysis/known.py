"""Facts that a graph shows whatever the samples are: known numbers and lengths, and the entries of indices."""
from __future__ import annotations

import contextlib
from typing import Any, Iterable

import numpy as np
import theano
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor
from theano.tensor.type_other import NoneTypeT

CASTS = scalar.Cast, scalar.Identity
# Scalar ops whose results are computed if their integers are known.
ARITHMETIC = CASTS + (scalar.Add, scalar.Sub, scalar.Mul, scalar.Neg, scalar.Maximum, scalar.Minimum, scalar.EQ,
                      scalar.NEQ, scalar.LT, scalar.GT, scalar.LE, scalar.GE)


def is_scalar_op(node: theano.Apply | None, *classes: type) -> bool:
    """Return whether a node computes one of these scalar ops, element by element."""
    return node is not None and isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, classes)


def is_zero(variable: theano.Variable) -> bool:
    """Return whether all elements of a variable are known to be 0."""
    if is_scalar_op(variable.owner, scalar.Mul):
        return any(map(is_zero, variable.owner.inputs))
    return number_everywhere(variable) == 0


def number_everywhere(variable: theano.Variable) -> float | None:
    """Return the number that all elements of a variable are known to be, else None."""
    with contextlib.suppress(basic.NotScalarConstantError, TypeError, ValueError):
        return float(basic.get_scalar_constant_value(variable, elemwise=True))
    return None


def number(variable: theano.Variable) -> Any:
    """Return the number that a scalar is known to be, else None."""
    try:
        return T.get_scalar_constant_value(variable)
    except (T.NotScalarConstantError, TypeError, IndexError):  # IndexError: for an element of joined vectors
        return _whole_number(variable) if variable.owner and variable.ndim == 0 else None


def _whole_number(variable):
    """Return the integer that a scalar is known to be, from lengths and their sums and choices, else None."""
    node = variable.owner
    if isinstance(node.op, (opt.Assert, basic.ScalarFromTensor, basic.TensorFromScalar)):
        return number(node.inputs[0])
    if isinstance(node.op, subtensor.Subtensor) and node.inputs[0].ndim == 1 and node.inputs[0].owner:
        place, = entries_of(node)
        return _known_element(node.inputs[0], int(place)) if are_numbers([place]) else None
    if not isinstance(node.op, elemwise.Elemwise) or np.dtype(variable.dtype).kind not in 'biu':
        return None
    if isinstance(node.op.scalar_op, scalar.Switch):
        condition = number(node.inputs[0])
        return None if condition is None else number(node.inputs[1 if condition else 2])
    if not isinstance(node.op.scalar_op, ARITHMETIC):
        return None
    numbers = [number(v) for v in node.inputs]
    return None if any(n is None for n in numbers) else np.asarray(node.op.scalar_op.impl(*numbers), variable.dtype)


def _known_element(vector, place):
    """Return the integer that an element of a vector is known to be, else None."""
    node, length = vector.owner, length_of(vector)
    if isinstance(node.op, compile_ops.Shape):
        x = node.inputs[0]
        return 1 if x.broadcastable[place] else length_of(x) if x.ndim == 1 else None
    if isinstance(node.op, elemwise.DimShuffle):
        return number(node.inputs[0] if node.op.new_order == ('x',) else node.inputs[0][place])
    if length is None or not -length <= place < length:
        return None
    if isinstance(node.op, elemwise.Elemwise):
        inputs = [v[place % length if length_of(v) == length else 0] for v in node.inputs]
        return number(node.op(*inputs))
    return number(element(vector, place % length)) if isinstance(node.op, basic.Join) else None


def length_of(vector: theano.Variable) -> int | None:
    """Return the length that a vector is known to have, else None."""
    with contextlib.suppress(ValueError, TypeError, IndexError):  # IndexError: for x[()]
        return T.get_vector_length(vector)
    node = vector.owner
    if not node or not isinstance(node.op, (elemwise.Elemwise, basic.Join)):
        return None
    lengths: list[Any] = [length_of(v) for v in node.inputs if v.ndim == 1]
    if not lengths or None in lengths:
        return None
    return max(lengths) if isinstance(node.op, elemwise.Elemwise) else sum(lengths)


def element(vector: theano.Variable, place: int) -> theano.Variable | None:
    """Return an element of a vector of whole numbers as a variable; None in a join of vectors of unknown lengths."""
    node = vector.owner
    if node and isinstance(node.op, opt.MakeVector):
        return node.inputs[place]
    if node and isinstance(node.op, elemwise.DimShuffle) and node.op.new_order == ('x',):
        return node.inputs[0]
    if is_scalar_op(node, *CASTS):
        before = element(node.inputs[0], place)
        return None if before is None else node.op(before)
    if not node or not isinstance(node.op, basic.Join):
        return vector[place]
    for piece in node.inputs[1:]:
        length = length_of(piece)
        if length is None or place < length:
            return None if length is None else element(piece, place)
        place -= length
    return None


# --- Indices -------------------------------------------------------------------------------------

def entries_of(node: theano.Apply, skip: int = 1) -> list[Any]:
    """Return the entries of a basic index, numbers where they are known; `skip` inputs of the node are no entries."""
    return [slice(*map(_known, (entry.start, entry.stop, entry.step))) if isinstance(entry, slice) else _known(entry)
            for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list)]


def slice_of(variable: theano.Variable) -> slice | None:
    """Return a variable that is a slice as one, with numbers where they are known; None for other variables."""
    if isinstance(variable, theano.Constant):
        return variable.data
    return slice(*map(_known, variable.owner.inputs)) if variable.owner else None


def _known(part):
    """Return a part of an index: None, a number where it is known, else the variable."""
    if part is None or isinstance(part, theano.Variable) and isinstance(part.type, NoneTypeT):
        return None
    value = number(part)
    return part if value is None else value


def are_numbers(entries: Iterable[Any]) -> bool:
    """Return whether all of an index is known."""
    return not any(isinstance(part, theano.Variable) for entry in entries for part in
                   ((entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,)))


def is_whole(entry: Any) -> bool:
    """Return whether an entry of an index takes a whole axis."""
    return isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None and entry.step in (None, 1)


def entry_at(entries: list[Any], axis: int) -> Any:
    """Return the entry of an index for an axis."""
    return entries[axis] if axis < len(entries) else slice(None)


def sliced_axes(entries: list[Any], ndim: int) -> list[int]:
    """Return the axes that an index does not drop: axis i of the result is axis ``sliced_axes(...)[i]`` before."""
    return [i for i in range(ndim) if isinstance(entry_at(entries, i), slice)]
