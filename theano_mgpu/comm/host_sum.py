"""The host side of all_reduce: the sum of the replicas' buffers in one pass."""
from __future__ import annotations

import operator
from typing import Any, Sequence

import numpy as np

from . import host_reduce

# Elements of a buffer that NumPy adds in less time than it takes to prepare anything else.
SMALL = 1 << 10
_description = operator.attrgetter('shape', 'dtype')


def all_reduce(buffers: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write the sum of buffers of one shape and floating dtype, in one pass over memory.

    No buffer shares the memory of `out`, but it may be the first buffer. Raises a ValueError if the shapes differ, or
    if `out` is not one piece of memory.

    Compiled code adds over several threads where there is a C++ compiler, else NumPy. Both sum in the order of the
    buffers and round alike, to the last bit. float16 is summed in float32.

    Examples
    --------
    >>> out = np.empty(2)
    >>> all_reduce([np.array([1., 2.]), np.array([3., 6.])], out)
    >>> out
    array([4., 8.])
    """
    shape = out.shape
    for buffer in buffers:
        if buffer.shape != shape:
            raise ValueError('buffers of one shape are summed; the shapes are %s'
                             % ', '.join(str(each.shape) for each in (out, *buffers)))
    flat_out = _flat(out, out)
    if out.size and not np.may_share_memory(flat_out, out):
        raise ValueError('out must be one piece of memory; its shape is %s, its strides %s' % (out.shape, out.strides))
    flat = [_flat(buffer, out) for buffer in buffers]
    if host_reduce.applies(flat_out, flat):
        host_reduce.add(flat_out, flat)
    else:
        add_by_numpy(flat_out, flat)


def all_reduce_each(lists: Sequence[Sequence[np.ndarray]], outs: Sequence[np.ndarray]) -> None:
    """Write the sums of the first arrays of some lists, of the second ones, and so on, as `all_reduce`.

    All lists have arrays of the shapes and dtypes of `outs`.
    """
    for out, first, *others in zip(outs, *lists):
        if others and out.size <= SMALL and out.dtype.char in 'fd':
            for other in others:
                first = np.add(first, other, out)
        else:
            all_reduce([first, *others], out)


def describe(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Return shapes and dtypes."""
    return list(map(_description, arrays))


def add_by_numpy(out: np.ndarray, buffers: Sequence[np.ndarray]) -> None:
    """Write the sum of flat buffers, in their order, by NumPy."""
    dtype = np.promote_types(out.dtype, 'float32')  # float16 is summed in float32
    total = out if out.dtype == dtype else np.empty(out.shape, dtype)
    first, *others = buffers
    if not others or first.dtype != dtype:  # NumPy would convert both terms of a sum in new memory
        np.copyto(total, first, casting='same_kind')
        first = total
    for buffer in others:
        first = np.add(first, buffer, total, dtype=dtype)
    if total is not out:
        out[...] = total


def _flat(buffer, like):
    """Return a one-dimensional view of a buffer in the memory order of `like`; a copy where they differ."""
    if buffer.strides != like.strides and buffer.size > 1:
        ordered = np.empty_like(like)
        ordered[...] = buffer
        buffer = ordered
    return buffer.ravel(order='K')
