"""Numbers that tell values apart: arrays, sparse matrices, random states, and whatever else Theano's types hold."""
from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np

SAMPLED = 8  # rows of an array, and elements along each of its other axes, that stand for all of them


def checksum(value: Any) -> int:
    """Return a number that tells values apart, the same in every process.

    Parameters
    ----------
    value : object
        An array on the host or on a device, a sparse matrix, a random state, a number, a text, None, or a slice, list,
        tuple or dict of these. Any other object counts by its class alone: two of them may differ by attributes
        that are not the same in each process.

    Returns
    -------
    int

    Examples
    --------
    >>> checksum([np.arange(3), 'a']) == checksum([np.arange(3), 'a'])
    True
    >>> checksum([np.arange(3), 'a']) == checksum([np.arange(3), 'b'])
    False
    """
    return _crc(_parts(value))


def sampled_checksum(value: Any) -> int:
    """Return a number as `checksum` does, from a few rows and elements of each large array."""
    return _crc(map(_sample, _parts(value)))


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that tell values apart to the bit, dtypes and shapes included.

    Parameters
    ----------
    value : object
        As for `checksum`.

    Examples
    --------
    >>> digest(np.zeros(2)) == digest(-np.zeros(2)), digest(np.zeros((2, 1))) == digest(np.zeros(2))
    (False, False)
    >>> digest(np.ones((2, 3)).T) == digest(np.ones((3, 2)))  # whatever the order in memory
    True
    """
    hashed = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        if isinstance(part, bytes):
            hashed.update(b'%d:' % len(part) + part)
        else:
            hashed.update(('%s%s' % (part.dtype.str, part.shape)).encode())
            hashed.update(np.ascontiguousarray(part).reshape(-1).view('uint8').data)
    return hashed.hexdigest()


def _crc(parts):
    number = 0
    for part in parts:
        number = zlib.crc32(part if isinstance(part, bytes) else np.ascontiguousarray(part).view('uint8').data, number)
    return number


def _sample(part):
    if isinstance(part, bytes) or part.size <= SAMPLED ** 2:
        return part
    return part[tuple(slice(None, None, 1 + (size - 1) // SAMPLED) for size in part.shape)]


def _parts(value):
    """Yield the arrays and bytes that make up a value."""
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject or hasattr(value, 'transfer'):
        yield np.asarray(value)
    elif hasattr(value, 'indptr'):  # a matrix of scipy.sparse, which need not be installed
        yield from _parts([value.shape, value.data, value.indices, value.indptr])
    elif isinstance(value, np.random.RandomState):
        yield from _parts(value.get_state())
    elif isinstance(value, np.ndarray):
        yield from _parts([value.shape, value.ravel().tolist()])
    elif isinstance(value, (list, tuple)):
        yield b'%d' % len(value)
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        yield from _parts(sorted(value.items(), key=repr))
    elif isinstance(value, slice):
        yield from _parts((value.start, value.stop, value.step))
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()
