"""The host side of all_reduce: the sum of the replicas' buffers in one pass."""
from __future__ import annotations

import threading
from typing import Iterator, Sequence

import numpy as np

from . import host_reduce

# Elements a block: two float32 blocks of 64 Ki elements fit into a core's second-level cache.
BLOCK = 1 << 16
# Elements of a buffer that NumPy adds in less time than it takes to prepare anything else.
SMALL = 1 << 10
# Bytes of gradients that are fetched while the ones before are added.
BUCKET = 1 << 22
_LOCAL = threading.local()


def all_reduce(buffers: Sequence[np.ndarray], out: np.ndarray | None = None, accumulate: bool = False) -> np.ndarray:
    """Return the sum of equal-shaped buffers, made in one pass over memory.

    Parameters
    ----------
    buffers : sequence of ndarray
        One a replica, of one shape and floating dtype.
    out : ndarray, optional
        Where the result goes; reused from step to step. Made like the first buffer if absent. It is one piece
        of memory that no buffer shares.
    accumulate : bool
        Add to what `out` holds.

    Returns
    -------
    ndarray
        `out`; without one, for one buffer, that buffer itself, uncopied.

    Raises
    ------
    ValueError
        If the shapes differ, if there is no buffer, or if `out` is not one piece of memory.

    Notes
    -----
    Each buffer is read from memory once and `out` is written once, by compiled code over several threads where
    there is a C++ compiler, else block by block in the cache. Both sum in the order of the buffers and round
    alike, to the last bit. float16 is summed in float32.

    Examples
    --------
    >>> all_reduce([np.array([1., 2.]), np.array([3., 6.])])
    array([4., 8.])
    """
    if not buffers:
        raise ValueError('there is nothing to add: give one buffer or more')
    if out is None:
        if len(buffers) == 1:
            return buffers[0]
        out = np.empty_like(buffers[0])
    shape = out.shape
    for buffer in buffers:
        if buffer.shape != shape:
            raise ValueError('buffers of one shape are summed; the shapes are %s'
                             % ', '.join(str(each.shape) for each in (out, *buffers)))
    if out.size <= SMALL and out.dtype.char in 'fd' and out.flags.forc:  # for less than the checks below take
        _add(out, out, buffers, accumulate)
        return out
    flat_out = _flat(out, out)
    if out.size and not np.may_share_memory(flat_out, out):
        raise ValueError('out must be one piece of memory; its shape is %s, its strides %s' % (out.shape, out.strides))
    flat = [_flat(buffer, out) for buffer in buffers]
    if host_reduce.applies(flat_out, flat):
        host_reduce.add(flat_out, flat, accumulate)
    else:
        add_blocks(flat_out, flat, accumulate)
    return out


def _add(total, target, buffers, accumulate):
    """Write the sum of buffers, in their order, and of `target` with `accumulate`, to `total`."""
    first, others, dtype = (target, buffers, total.dtype) if accumulate else (buffers[0], buffers[1:], total.dtype)
    if not others or first.dtype != dtype:  # NumPy would convert both terms of a sum in new memory
        np.copyto(total, first, casting='same_kind')
        first = total
    for buffer in others:
        first = np.add(first, buffer, total, dtype=dtype)


def add_blocks(out: np.ndarray, buffers: Sequence[np.ndarray], accumulate: bool) -> None:
    """Write a sum by NumPy, block by block, so that the partial sums stay in the cache.

    Parameters
    ----------
    out : ndarray, shape (size,)
    buffers : sequence of ndarray, shape (size,)
    accumulate : bool
        Add to what `out` holds.
    """
    sum_dtype = np.promote_types(out.dtype, 'float32')
    scratch = _scratch(sum_dtype) if sum_dtype != out.dtype else None
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        target = out[block]
        total = target if scratch is None else scratch[:target.size]
        _add(total, target, [buffer[block] for buffer in buffers], accumulate)
        if scratch is not None:
            target[...] = total


def _scratch(dtype):
    """Return this thread's block for partial sums of a dtype."""
    blocks = vars(_LOCAL)
    if dtype.str not in blocks:
        blocks[dtype.str] = np.empty(BLOCK, dtype)
    return blocks[dtype.str]


def _flat(buffer, like):
    """Return a one-dimensional view of a buffer in the memory order of `like`; a copy where they differ."""
    if buffer.strides != like.strides and buffer.size > 1:
        ordered = np.empty_like(like)
        ordered[...] = buffer
        buffer = ordered
    return buffer.ravel(order='K')


def bucket_ranges(sizes: Sequence[int], bucket: int = BUCKET) -> Iterator[tuple[int, int]]:
    """Yield the first and one-past-last of consecutive arrays that are fetched, and then added, together.

    Parameters
    ----------
    sizes : list of int
        Bytes of each array.
    bucket : int
        Bytes that each bucket has at least, but for the last one.

    Yields
    ------
    start, stop : int

    Examples
    --------
    >>> list(bucket_ranges([3, 3, 1, 9], bucket=5))
    [(0, 2), (2, 4)]
    """
    start, total = 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total >= bucket or i == len(sizes) - 1:
            yield start, i + 1
            start, total = i + 1, 0
