"""The host side of all_reduce: a weighted mean of the replicas' buffers in one pass."""
import threading

import numpy as np

from . import host_reduce

# Elements a block: two float32 blocks of 64 Ki elements fit into a core's second-level cache.
BLOCK = 1 << 16
# Bytes of gradients that are fetched while the ones before are added.
BUCKET = 1 << 22
_LOCAL = threading.local()


def all_reduce(buffers, weights, out=None, accumulate=False):
    """Weighted sum of equal-shaped buffers, in one pass over memory.

    Parameters
    ----------
    buffers : list of ndarray
        One a replica, of one shape and floating dtype.
    weights : list of float
        One a buffer; for a mean over samples, the sub-batch's share of the batch.
    out : ndarray, optional
        Where the result goes; reused from step to step. Made like the first buffer if absent. It is one piece
        of memory that no buffer shares.
    accumulate : bool
        Add to what `out` holds.

    Returns
    -------
    ndarray
        `out`; without one, for one buffer of weight 1, that buffer itself, uncopied.

    Raises
    ------
    ValueError
        If the shapes differ, if there is not one weight a buffer, or if `out` is not one piece of memory.

    Notes
    -----
    Each buffer is read from memory once and `out` is written once, by compiled code over several threads where
    there is a C++ compiler, else block by block in the cache. Both sum in the order of the buffers and round
    alike, to the last bit. float16 is summed in float32.

    Examples
    --------
    >>> all_reduce([np.array([1., 2.]), np.array([3., 6.])], [0.5, 0.5])
    array([2., 4.])
    """
    if not buffers or len(buffers) != len(weights):
        raise ValueError('%d buffers need one weight each; there are %d' % (len(buffers), len(weights)))
    if out is None:
        if len(buffers) == 1 and weights[0] == 1:
            return buffers[0]
        out = np.empty_like(buffers[0])
    shapes = [out.shape] + [buffer.shape for buffer in buffers]
    if len(set(shapes)) > 1:
        raise ValueError('buffers of one shape are summed; the shapes are %s' % ', '.join(map(str, shapes)))
    flat_out = _flat(out, out)
    if out.size and not np.may_share_memory(flat_out, out):
        raise ValueError('out must be one piece of memory; its shape is %s, its strides %s' % (out.shape, out.strides))
    flat = [_flat(buffer, out) for buffer in buffers]
    if host_reduce.applies(flat_out, flat):
        host_reduce.weighted_sum(flat_out, flat, weights, accumulate)
    else:
        sum_blocks(flat_out, flat, weights, accumulate)
    return out


def sum_blocks(out, buffers, weights, accumulate):
    """Write a weighted sum by NumPy, block by block, so that the partial sums stay in the cache.

    Parameters
    ----------
    out : ndarray, shape (size,)
    buffers : list of ndarray, shape (size,)
    weights : list of float
        One a buffer.
    accumulate : bool
        Add to what `out` holds.
    """
    sum_dtype = np.promote_types(out.dtype, 'float32')
    scratch = _scratch('product', sum_dtype)
    total = _scratch('total', sum_dtype) if sum_dtype != out.dtype else None
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        target = out[block]
        product = scratch[:target.size]
        partial = target if total is None else total[:target.size]
        if accumulate and total is not None:
            partial[...] = target
        for i, (buffer, weight) in enumerate(zip(buffers, weights)):
            if i == 0 and not accumulate:
                np.multiply(buffer[block], weight, out=partial, dtype=sum_dtype)
            else:
                np.multiply(buffer[block], weight, out=product, dtype=sum_dtype)
                np.add(partial, product, out=partial)
        if total is not None:
            target[...] = partial


def _scratch(name, dtype):
    """This thread's block for intermediate results."""
    blocks = vars(_LOCAL)
    key = name + dtype.str
    if key not in blocks:
        blocks[key] = np.empty(BLOCK, dtype)
    return blocks[key]


def _flat(buffer, like):
    """One-dimensional view of a buffer in the memory order of `like`; a copy where they differ."""
    if buffer.strides != like.strides and buffer.size > 1:
        ordered = np.empty_like(like)
        ordered[...] = buffer
        buffer = ordered
    return buffer.ravel(order='K')


def bucket_ranges(sizes, bucket=BUCKET):
    """First and one-past-last of consecutive arrays that are fetched, and then added, together.

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
