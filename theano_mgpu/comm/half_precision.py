"""Sums over the ranks in half precision: the ranks exchange float16."""
from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Sequence

import numpy as np
import theano

from ..utils import native
from .collectives import split
from .communicator import Communicator

# The processor converts eight numbers at a time; NumPy takes ten times as long. Both round to the nearest.
SOURCE = Path(__file__).with_name('half_precision.cpp')

EXPONENT = 15  # arrays are scaled to have their largest element below 2**15; float16 ends at 65504


def all_reduce_in_half(ranks: Communicator, arrays: Sequence[np.ndarray]) -> None:
    """Add arrays over the ranks, in place, but exchange them as float16. Each rank gets the same bits.

    The ranks have just had a handshake. Each rank adds a share of each array, in float32 or a wider dtype of the
    arrays, and sends the sums to the others: a reduce-scatter, and an all-gather. The arrays are C-contiguous, of any
    shape and floating dtypes.

    Notes
    -----
    Each part of an array is scaled by a power of 2, so that its largest element is between 2**14 and 2**15. So nothing
    overflows, and elements down to 2**-28 of the largest keep 11 bits. Hence the error of a sum is at most ``2**-11 *
    (s + abs(sum)) + 2**-39 * l``, beside rounding in float32. Here s is the sum of the absolute values that are added,
    and l adds up the largest absolute values of the array on each rank and of the summed array.

    Horovod's ``Compression.fp16`` (Sergeev and Del Balso, 2018) sends float16, too. It does not scale, and adds in
    float16.
    """
    if ranks.size == 1:
        return
    shares = list(zip(*(np.array_split(array.reshape(-1), ranks.size) for array in arrays)))
    parts = [_packed(share) for share in shares]
    lengths = [part.size for part in parts]
    sums = [np.zeros(part.size, np.result_type(part.dtype, 'float32')) for part in shares[ranks.rank]]
    for message in ranks.all_to_all(parts, [lengths[ranks.rank]] * ranks.size):
        _unpack(message, sums, add=True)
    messages = np.empty(sum(lengths), 'int16')
    ranks.all_gather(_packed(sums), messages, lengths)
    for share, message in zip(shares, split(messages, lengths)):
        _unpack(message, share)


def _packed(parts):
    """Return arrays as one of int16: the exponent of each, then all elements as float16, scaled by it."""
    message = np.empty(len(parts) + sum(part.size for part in parts), 'int16')
    at = len(parts)
    for i, part in enumerate(parts):
        message[i] = exponent = _exponent(part)
        _to_half(message[at:at + part.size], part, EXPONENT - exponent)
        at += part.size
    return message


def _unpack(message, arrays, add=False):
    """Write a message of `_packed` to as many arrays, or add it to them."""
    at = len(arrays)
    for exponent, array in zip(message[:at].tolist(), arrays):
        _from_half(array, message[at:at + array.size], exponent - EXPONENT, add)
        at += array.size


def _exponent(part):
    """Return the exponent of the next power of 2 above the largest absolute value; `EXPONENT` for 0 or infinity."""
    largest = max(part.max(initial=0), -part.min(initial=0))
    return int(np.frexp(largest)[1]) if np.isfinite(largest) and largest else EXPONENT


def _to_half(out, values, exponent):
    """Write values * 2**exponent as float16 to an array of int16."""
    library = _library_for(values, exponent)
    if library is not None:
        library.to_half(out.ctypes.data, values.ctypes.data, 2.0 ** exponent, out.size)
        return
    with np.errstate(over='ignore'):  # an array may have infinities beside large numbers
        out.view('float16')[...] = np.ldexp(values, exponent)


def _from_half(out, message, exponent, add):
    """Write, or add, an array of int16 as float16, times 2**exponent."""
    library = _library_for(out, exponent)
    if library is not None:
        library.from_half(out.ctypes.data, message.ctypes.data, 2.0 ** exponent, out.size, add)
        return
    values = np.ldexp(message.view('float16').astype(np.result_type(out.dtype, 'float32')), exponent)
    out[...] = out + values if add else values


def _library_for(array, exponent):
    """Return the compiled code if it applies, else None; it multiplies by 2**exponent, which has to be normal."""
    return _compiled(theano.config.cxx) if array.dtype == 'float32' and abs(exponent) < 126 else None


@functools.lru_cache(maxsize=None)
def _compiled(compiler):
    """Return the library; None where it cannot be built, and on processors without these instructions."""
    library = native.load(SOURCE, ['-O3'], 'converts gradients to half precision',
                          'NumPy converts them, more slowly.')
    if library is None or not library.converts():
        return None
    library.to_half.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_size_t]
    library.from_half.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_size_t, ctypes.c_int]
    library.to_half.restype = library.from_half.restype = None
    return library
