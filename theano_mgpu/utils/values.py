"""The comparison of values: numbers that tell them apart, and how far they differ.

Numbers are for arrays, sparse matrices, random states, and whatever else Theano's types hold.
"""
from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from typing import Any, Iterable, Mapping

import numpy as np

SAMPLED = 8  # rows of an array, and elements along each of its other axes, that stand for all of them
SHOWN = 8    # items of a list that a message shows
# The largest relative difference that counts as rounding, for each dtype.
TOLERANCE = {'float16': 1e-2, 'float32': 1e-5, 'float64': 1e-10}

# --- digests


def checksum(value: Any) -> int:
    """Return a number that tells values apart, the same in every process.

    A value is an array on the host or on a device, a sparse matrix, a random state, a number, a text, None, or a slice,
    list, tuple or dict of these. Any other object counts by its class alone: two of them may differ by attributes that
    are not the same in each process.

    >>> [checksum([np.arange(3), 'a']) == checksum([np.arange(3), text]) for text in 'ab']
    [True, False]
    """
    return _crc(_parts(value))


def sampled_checksum(value: Any) -> int:
    """Return a number as `checksum` does, from a few rows and elements of each large array."""
    return _crc(map(_sample, _parts(value)))


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that tell values apart to the bit, dtypes and shapes included.

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


def is_due(count: int, every: int) -> bool:
    """Return whether to compare after a count of steps: after each k-th one, and after 1, 2, 4, 8 before the first."""
    return count % every == 0 or count < every and not count & (count - 1)


def sides(numbers: Mapping[Any, Any]) -> tuple[list[Any], list[Any], bool]:
    """Return the places that have the most frequent one of several numbers, the others, and whether those are fewer.

    >>> sides({'a': 5, 'b': 7, 'c': 7}), sides({'a': 5, 'b': 7})
    ((['b', 'c'], ['a'], True), (['a'], ['b'], False))
    """
    (most, count), (_, next_count) = Counter(numbers.values()).most_common(2)
    return [place for place in numbers if numbers[place] == most], \
        [place for place in numbers if numbers[place] != most], count > next_count


def shortened(items: Any, after: str = '') -> str:
    """Return the first items of a list as a text, then a text after them, and how many there are more."""
    more = len(items) - SHOWN
    return ', '.join(map(str, items[:SHOWN])) + after + ' and %d more' % more * (more > 0)


# --- differences


def coarsest(dtypes: Iterable[Any]) -> str:
    """Return the real dtype that rounds most; float64 if there is none."""
    return max(set(dtypes).intersection(TOLERANCE), key=TOLERANCE.__getitem__, default='float64')


def alike(value: Any, reference: Any) -> Any:
    """Return which elements are equal, or both NaN."""
    return (value == reference) | (value != value) & (reference != reference)


def largest(value: Any) -> float:
    """Return the largest absolute value; 0 for no values."""
    return float(np.abs(np.asarray(value, 'float64')).max()) if np.size(value) else 0.0


def relative_difference(value: Any, reference: Any, least: float = 0) -> float:
    """Return the largest difference, relative to the largest value of the reference, or to `least` if that is larger.

    Values that are equal, or both NaN, have no difference.

    >>> relative_difference([1.0, 5.0], [1.0, 4.0])
    0.25
    >>> relative_difference([float('nan'), float('inf')], [float('nan'), float('inf')])
    0.0
    """
    value, reference = np.asarray(value, 'float64'), np.asarray(reference, 'float64')
    if value.shape != reference.shape:
        return float('inf')
    same, finite = alike(value, reference), np.where(np.isfinite(reference), reference, 0)
    return largest(np.where(same, 0, value) - np.where(same, 0, reference)) / (max(largest(finite), least) or 1)


def wrong(value: Any, expected: Any, relative: float, absolute: float) -> str:
    """Return how far a value is from the expected one, in words; '' if it is near enough."""
    near = np.allclose(value, expected, rtol=relative, atol=absolute)
    return '' if near else 'is wrong by up to %.2g' % np.abs(value - expected).max()


def differing_bits(one: np.ndarray, other: np.ndarray) -> str:
    """Return in words how the bits of two arrays differ: -0.0 is not 0.0, and a NaN equals itself.

    >>> differing_bits(np.array([1., 2, 3]), np.array([1., 2, 4]))
    '1 of 3 numbers, the first at [2]: 3.0 and 4.0'
    """
    if one.shape != other.shape:
        return 'their shapes are %s and %s' % (one.shape, other.shape)
    bits = [np.ascontiguousarray(each).reshape(-1).view('uint8').reshape(one.size, -1) for each in (one, other)]
    different = (bits[0] != bits[1]).any(axis=1).reshape(one.shape)
    return '%s: %s and %s' % (elements(different), one[different][0], other[different][0])


def elements(mask: np.ndarray) -> str:
    """Return in words which elements of an array a mask has.

    >>> elements(np.array([False, True, True]))
    '2 of 3 numbers, the first at [1]'
    """
    return '%d of %d numbers, the first at %s' % (mask.sum(), mask.size, list(map(int, np.argwhere(mask)[0])))
