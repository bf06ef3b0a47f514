"""The sum of buffers on the host, in one pass: in compiled code where there is a compiler, else by NumPy.

In compiled code several threads read each buffer once, and write the sum once. It is C++, built at first use by
Theano's compiler, and called through ctypes, which lets go of Python's lock. It keeps nothing from call to call, so
several threads may call it at once.
"""
from __future__ import annotations

import ctypes
import functools
import operator
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import theano

from ..utils import native, processor
from ..utils.pointers import pointers_to

# Elements of a buffer that NumPy adds in less time than it takes to prepare anything else.
SMALL = 1 << 10
# From this many elements on the call of compiled code is cheaper than NumPy's loop over blocks.
SMALLEST = 1 << 14
# Bytes read and written for which one more thread is worth its start. Above two shares, which no cache is
# counted on to hold, the sum is written past the cache, so that its lines are not read first.
SHARE = 1 << 23
SOURCE = Path(__file__).with_suffix('.cpp')
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
    if is_for_code(flat_out, flat):
        add_by_code(flat_out, flat)
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


def is_for_code(out: np.ndarray, buffers: Sequence[np.ndarray]) -> bool:
    """Return whether the compiled code can sum these flat buffers, and faster than NumPy.

    It cannot for few elements, for a dtype other than float32 or float64, and without a C++ compiler.
    """
    return (out.size >= SMALLEST and out.dtype in _functions(theano.config.cxx) and out.flags.writeable
            and all(array.dtype == out.dtype and array.flags.aligned for array in [out, *buffers]))


def add_by_code(out: np.ndarray, buffers: Sequence[np.ndarray]) -> None:
    """Write the sum of buffers for which `is_for_code` holds. The first one may be `out`.

    Each element is summed in the order of the buffers, whatever the number of threads.
    """
    function = _functions(theano.config.cxx)[out.dtype]
    count = len(buffers)
    shares = (count + 1) * out.nbytes // SHARE
    function(ctypes.c_void_p(out.ctypes.data), pointers_to(buffers), count, ctypes.c_size_t(out.size), shares > 1,
             max(1, min(processor.threads(), shares)))


@functools.lru_cache(maxsize=None)
def _functions(compiler):
    """Return the compiled function of each dtype; none where the code cannot be built."""
    library = native.load(SOURCE, ['-O3', '-pthread'], 'adds gradients on the host', 'NumPy adds them, on one core.')
    names = ('float32', 'float64') if library else ()
    return {np.dtype(name): getattr(library, 'sum_' + name) for name in names}


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
