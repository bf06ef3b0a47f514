"""Whole numbers that are computed from shapes: how they depend on the number of samples, and which are known."""
from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import theano
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor
from theano.tensor.type_other import NoneTypeT

from .states import COUNT, NUMBER

CASTS = scalar.Cast, scalar.Identity
# Scalar ops whose results are computed if their integers are known.
ARITHMETIC = CASTS + (scalar.Add, scalar.Sub, scalar.Mul, scalar.Neg, scalar.Maximum, scalar.Minimum, scalar.EQ,
                      scalar.NEQ, scalar.LT, scalar.GT, scalar.LE, scalar.GE)


def size_of(node: theano.Apply, sizes: list[Any]) -> Any:
    """Return the size of the outputs of a node, if its inputs are constants of these sizes.

    Parameters
    ----------
    sizes : list of {COUNT, NUMBER, None} or tuple
        Not all None.
    """
    op = node.op
    if isinstance(op, opt.MakeVector):
        return _vector(sizes)
    if isinstance(op, (basic.ScalarFromTensor, basic.TensorFromScalar, compile_ops.Rebroadcast, compile_ops.ViewOp,
                       elemwise.DimShuffle, opt.Assert)):
        return sizes[0] if node.outputs[0].ndim <= 1 or not isinstance(sizes[0], tuple) else NUMBER
    if isinstance(op, subtensor.Subtensor):
        return _picked(node, sizes)
    if isinstance(op, basic.Join):
        pieces = [elements(v, s) for v, s in zip(node.inputs[1:], sizes[1:])]
        return NUMBER if None in pieces else _vector(sum(pieces, ()))
    if isinstance(op, elemwise.CAReduce) and isinstance(op.scalar_op, (scalar.Add, scalar.Mul)):
        parts = elements(node.inputs[0], sizes[0])
        if parts is not None:
            return _sum(parts) if isinstance(op.scalar_op, scalar.Add) else _product(parts)
    if isinstance(op, elemwise.Elemwise):
        return _elementwise(node, sizes)
    return NUMBER  # also for a Shape op: rules.shapes gives its size


def elements(variable: theano.Variable, size: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a vector's elements; None if its length is not known."""
    if isinstance(size, tuple):
        return size
    length = length_of(variable)
    return None if length is None else (size,) * length


def _vector(sizes):
    return tuple(sizes) if any(size is not None for size in sizes) else None


def _picked(node, sizes):
    if not node.op.idx_list:
        return sizes[0]
    if not isinstance(sizes[0], tuple) or any(size is not None for size in sizes[1:]):
        return sizes[0] if sizes[0] == COUNT and node.inputs[0].ndim == 1 else NUMBER
    entry, = entries_of(node)
    if not are_numbers([entry]):
        return NUMBER
    return _vector(sizes[0][entry]) if isinstance(entry, slice) else sizes[0][int(entry)]


def _elementwise(node, sizes):
    if not any(isinstance(size, tuple) for size in sizes):
        return _scalar(node, sizes)
    lengths = {length_of(v) for v in node.inputs if not v.broadcastable[0]} or {1} if node.outputs[0].ndim == 1 else ()
    if len(lengths) != 1 or None in lengths:
        return NUMBER
    n, = lengths
    sizes = [size * n if isinstance(size, tuple) and len(size) == 1 else size for size in sizes]
    return _vector([_scalar(node, [size[i] if isinstance(size, tuple) else size for size in sizes])
                    for i in range(n)])


def _scalar(node, sizes):
    op = node.op.scalar_op
    if all(size is None for size in sizes):
        return None
    if isinstance(op, scalar.Second):
        return sizes[1]
    if not all(_is_whole(v) for v in node.outputs):
        return NUMBER
    if isinstance(op, CASTS):
        return sizes[0] if _is_whole(node.inputs[0]) else NUMBER
    if isinstance(op, (scalar.Minimum, scalar.Maximum)) and set(sizes) == {COUNT}:
        return COUNT
    if isinstance(op, (scalar.Add, scalar.Sub, scalar.Neg)):
        return _sum(size for size, v in zip(sizes, node.inputs) if size is not None or number(v) != 0)
    if isinstance(op, scalar.Mul):
        return _product(sizes)
    if isinstance(op, scalar.IntDiv) and sizes == [COUNT, COUNT]:
        return None
    return sizes[1] if isinstance(op, scalar.Switch) and sizes[0] is None and sizes[1] == sizes[2] else NUMBER


def _is_whole(variable):
    return np.dtype(variable.dtype).kind in 'iu'


def _sum(sizes: Iterable[Any]) -> str | None:
    kinds = set(sizes)
    return COUNT if kinds == {COUNT} else None if kinds <= {None} else NUMBER


def _product(sizes):
    factors = [size for size in sizes if size is not None]
    return COUNT if factors == [COUNT] else NUMBER if factors else None


def length_of(vector: theano.Variable) -> int | None:
    """Return the length that a vector is known to have, else None."""
    try:
        return T.get_vector_length(vector)
    except (ValueError, TypeError, IndexError):  # IndexError: for x[()]
        pass
    node = vector.owner
    if not node or not isinstance(node.op, (elemwise.Elemwise, basic.Join)):
        return None
    lengths: list[Any] = [length_of(v) for v in node.inputs if v.ndim == 1]
    if not lengths or None in lengths:
        return None
    return max(lengths) if isinstance(node.op, elemwise.Elemwise) else sum(lengths)


def entries_of(node: theano.Apply, skip: int = 1) -> list[Any]:
    """Return the entries of a basic index, numbers where they are known; `skip` inputs of the node are no entries."""
    return [slice(*map(known, (entry.start, entry.stop, entry.step))) if isinstance(entry, slice) else known(entry)
            for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list)]


def are_numbers(entries: Iterable[Any]) -> bool:
    """Return whether all of an index is known."""
    return not any(isinstance(part, theano.Variable) for entry in entries for part in
                   ((entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,)))


def known(part: Any) -> Any:
    """Return a part of an index: None, a number where it is known, else the variable."""
    if part is None or isinstance(part, theano.Variable) and isinstance(part.type, NoneTypeT):
        return None
    value = number(part)
    return part if value is None else value


def number(variable: Any) -> Any:
    """Return the number that a scalar is known to be, else None. A number is returned as it is."""
    if not isinstance(variable, theano.Variable):
        return variable
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


def element(vector: theano.Variable, place: int) -> theano.Variable | None:
    """Return an element of a vector of whole numbers as a variable; None in a join of vectors of unknown lengths."""
    node = vector.owner
    if node and isinstance(node.op, opt.MakeVector):
        return node.inputs[place]
    if node and isinstance(node.op, elemwise.DimShuffle) and node.op.new_order == ('x',):
        return node.inputs[0]
    if node and isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, CASTS):
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
