"""Groups of consecutive batches, each of which one call computes, and their outputs apart again."""
from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

import numpy as np

from ..errors import PredictionError

PATIENCE = 0.1  # seconds after which a batch that was read waits for no other one
Joins = Callable[[Sequence[int]], bool]


class Group(NamedTuple):
    """Consecutive batches, put together along axis 0; or the error of one that cannot be computed.

    Attributes
    ----------
    first : int
        The number of the first batch.
    arrays : list
        One for each input.
    lengths : list of int
        The samples of each batch.
    error : PredictionError or None
    """

    first: int
    arrays: Sequence[Any]
    lengths: Sequence[int]
    error: Optional[PredictionError] = None

    def apart(self, split: Sequence[bool]) -> list[Group]:
        """Return a group for each of the batches; inputs that are `split` have samples."""
        return [Group(self.first + i, sliced(self.arrays, split, piece), [piece.stop - piece.start])
                for i, piece in enumerate(pieces(self.lengths))]


def pieces(lengths: Sequence[int]) -> list[slice]:
    """Return the rows of consecutive batches.

    >>> pieces([2, 0, 1])
    [slice(0, 2, None), slice(2, 2, None), slice(2, 3, None)]
    """
    return [slice(stop - length, stop) for stop, length in zip(itertools.accumulate(lengths), lengths)]


def sliced(arrays: Sequence[Any], split: Sequence[bool], piece: slice) -> list[Any]:
    """Return the samples of a piece; arrays that are not `split` stay whole."""
    return [array[piece] if has_samples else array for array, has_samples in zip(arrays, split)]


def split_rows(outputs: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Return the outputs of each batch of a group, as views where they are arrays."""
    return [[output[piece] for output in outputs] for piece in pieces(lengths)]


def groups_of(arrays: Sequence[Any], split: Sequence[bool], length: int, batch_size: int, most: int,
              joins: Joins) -> Iterator[Group]:
    """Yield the batches of `batch_size` that arrays of a length consist of, as `grouped` does.

    The last one may be smaller. There is one, of no samples, where there are none.
    """
    for start in range(0, length or 1, most * batch_size):
        stop = min(start + most * batch_size, length)  # Keras's HDF5Matrix has no slices beyond its end
        lengths = [min(batch_size, stop - first) for first in range(start, stop, batch_size)] or [0]
        group = Group(start // batch_size, sliced(arrays, split, slice(start, stop)), lengths)
        yield from [group] if joins(lengths) else group.apart(split)


def grouped(batches: Iterable[Any], split: Sequence[bool], most: int, joins: Joins) -> Iterator[Group]:
    """Yield consecutive batches in groups of at most `most`, without waiting for long.

    A batch is a list with an array for each input, or a PredictionError. Batches of a group have arrays of one type,
    and of one shape but for the samples, and ``joins(lengths)`` is true for the samples of each. An error of `batches`
    is raised after the batches before it.
    """
    waiting: list[Group] = []
    began = time.monotonic()
    try:
        for number, batch in enumerate(batches):
            group = Group(number, (), (), batch) if isinstance(batch, PredictionError) else \
                Group(number, batch, [next(len(array) for array, has_samples in zip(batch, split) if has_samples)])
            if waiting and not _are_alike(waiting[0], group, split):
                yield from _together(waiting, split, joins)
                began = time.monotonic()
            waiting.append(group)
            del batch, group  # their memory is free once they are together
            if len(waiting) == most or time.monotonic() - began > PATIENCE:
                yield from _together(waiting, split, joins)
                began = time.monotonic()
    except Exception:
        yield from _together(waiting, split, joins)
        raise
    yield from _together(waiting, split, joins)


def read_ahead(groups: Iterator[Group], most: int) -> tuple[list[Group], Exception | None]:
    """Return at most so many groups, without waiting for long, and the error of their reader, which comes after them.
    """
    read: list[Group] = []
    began = time.monotonic()
    try:
        while len(read) < most and (not read or time.monotonic() - began < PATIENCE):
            read.append(next(groups))
    except Exception as error:
        return read, error
    return read, None


def _are_alike(one, other, split):
    """Return whether two batches can be put together."""
    return len(one.arrays) == len(other.arrays) > 0 and all(
        type(a) is type(b) is np.ndarray and a.dtype == b.dtype
        and (a.shape[1:] == b.shape[1:] if has_samples else np.array_equal(a, b))
        for a, b, has_samples in zip(one.arrays, other.arrays, split))


def _together(waiting, split, joins):
    """Return some batches as one group, or each by itself where they cannot be put together; keep none waiting."""
    groups, lengths = list(waiting), [length for group in waiting for length in group.lengths]
    waiting.clear()
    if len(groups) < 2 or not joins(lengths):
        return groups
    columns = zip(*[group.arrays for group in groups])
    return [Group(groups[0].first, [np.concatenate(column) if has_samples else column[0]
                                    for column, has_samples in zip(columns, split)], lengths)]
