"""Whole numbers that are computed from shapes: how they depend on the number of samples."""
from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import theano
from theano.compile import ops as compile_ops
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor

from .known import CASTS, are_numbers, entries_of, length_of, number
from .states import COUNT, NUMBER


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
