"""Add arrays over the ranks with half of the bytes: what they send each other is float16."""
from typing import Callable, List, Sequence, Tuple

import numpy as np

EXPONENT = 15  # arrays are scaled to have their largest element below 2**15; float16 ends at 65504

Range = Tuple[int, int, int]  # the number of an array, and the elements of it from a start to a stop


def add_in_half(arrays: Sequence[np.ndarray], size: int, to_each: Callable, to_all: Callable, rank: int) -> None:
    """Add arrays over the ranks, in place; bitwise the same on each rank.

    Each rank adds a share of all elements, in float32 or what is wider among the arrays, and sends the sums to the
    others: a reduce-scatter, and an all-gather.

    Parameters
    ----------
    arrays : list of ndarray
        C-contiguous, of floating dtypes, and of the same shapes on each rank.
    size, rank : int
    to_each : callable
        ``to_each(messages, lengths)`` sends an array of int16 to each rank, and returns what each one has sent to this
        rank, of the given lengths.
    to_all : callable
        ``to_all(message, lengths)`` sends one to all ranks, and returns those of all, of the given lengths.

    Notes
    -----
    Each part of an array is scaled by a power of 2, so that its largest element is between 2**14 and 2**15. So nothing
    overflows, and elements down to 2**-28 of the largest keep 11 bits. Hence the error of a sum is at most ``2**-11 *
    (s + abs(sum))``, where s is the sum of the absolute values that are added, and 2**-39 of the largest values in the
    arrays and in their sum for each rank.

    What is sent as float16 is Horovod's ``Compression.fp16`` (Sergeev and Del Balso, 2018), which does not scale, and
    adds in float16.
    """
    flat = [array.reshape(-1) for array in arrays]
    shares = _shares([array.size for array in flat], size)
    lengths = [_length(share) for share in shares]
    own, wide = shares[rank], [np.result_type(array.dtype, 'float32') for array in flat]
    parts = to_each([_packed([flat[i][start:stop] for i, start, stop in share]) for share in shares],
                    [lengths[rank]] * size)
    sums = [np.zeros(stop - start, wide[i]) for i, start, stop in own]
    for part in parts:
        for total, values in zip(sums, _unpacked(part, own, wide)):
            total += values
    for share, message in zip(shares, to_all(_packed(sums), lengths)):
        for (i, start, stop), values in zip(share, _unpacked(message, share, wide)):
            flat[i][start:stop] = values


def _shares(sizes: Sequence[int], n: int) -> List[List[Range]]:
    """Divide the elements of arrays, in their order, into n shares that differ by one element at most."""
    ends, total = np.cumsum([0] + list(sizes)).tolist(), sum(sizes)
    bounds = [total * k // n for k in range(n + 1)]
    return [[(i, max(begin, first) - begin, min(end, last) - begin)
             for i, (begin, end) in enumerate(zip(ends, ends[1:])) if max(begin, first) < min(end, last)]
            for first, last in zip(bounds, bounds[1:])]


def _length(share: Sequence[Range]) -> int:
    return len(share) + sum(stop - start for _, start, stop in share)


def _packed(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays as one of int16: the exponent of each, then all elements as float16, scaled by it."""
    message = np.empty(len(parts) + sum(part.size for part in parts), 'int16')
    at = len(parts)
    for i, part in enumerate(parts):
        message[i] = exponent = _exponent(part)
        with np.errstate(over='ignore'):  # of an array that has infinities beside what is large
            message[at:at + part.size].view('float16')[...] = np.ldexp(part, EXPONENT - exponent)
        at += part.size
    return message


def _unpacked(message: np.ndarray, share: Sequence[Range], dtypes: Sequence[np.dtype]):
    """The arrays of a message, one after the other, each of the dtype of that number."""
    at = len(share)
    for exponent, (i, start, stop) in zip(message.tolist(), share):
        yield np.ldexp(message[at:at + stop - start].view('float16').astype(dtypes[i]), exponent - EXPONENT)
        at += stop - start


def _exponent(part: np.ndarray) -> int:
    """Of the power of 2 that is just above the largest absolute value; none is scaled where that is not finite."""
    largest = max(part.max(initial=0), -part.min(initial=0))
    return int(np.frexp(largest)[1]) if np.isfinite(largest) and largest else EXPONENT
