"""The places of sums in memory: in one flat array a dtype, so that many are copied, and added, in one go."""
from __future__ import annotations

import collections
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from ..devices.exchange_operations import EVERY

ALIGNED = 16     # an array begins at a multiple of as many elements, for instructions that take several at once
SMALL = 1 << 15  # bytes of an array that is copied together with others


class Range(NamedTuple):
    """Some elements of an array, and a place for them in the memory for a list of ranges."""

    number: int         # of the array
    dtype: Any
    start: int
    stop: int
    place: int = 0      # where they begin, among elements of their dtype
    owner: int = EVERY  # the place of the device that adds them

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return (self.stop - self.start) * self.dtype.itemsize


class Flat(NamedTuple):
    """Memory for sums: flat arrays by dtype, and each sum by its number."""

    flat: dict[Any, Any]
    views: dict[int, Any]


class Layout:
    """The places of sums in flat arrays, one a dtype: scalars first, then small sums, then large ones.

    Large sums that are `apart` have no place there: they are copied, and added, from where they are.
    """

    def __init__(self, like: Sequence[tuple[tuple[int, ...], np.dtype]], apart: bool = False) -> None:
        self.like = list(like)
        self.counts = [int(np.prod(shape, dtype='int64')) for shape, _ in like]
        self.large = [i for i, (_, dtype) in enumerate(like) if self.counts[i] * dtype.itemsize > SMALL]
        self.sizes: dict[Any, int] = {}    # elements of each flat array, by dtype
        self.scalars: dict[Any, int] = {}  # elements that the scalars take at its beginning
        self.places: dict[int, tuple[Any, int, int]] = {}  # of each sum: dtype, start, stop; in their order
        small = [i for i in range(len(like)) if i not in self.large]
        self.small = [i for i in small if self.counts[i]]
        for i in sorted(small, key=lambda i: bool(like[i][0])) + ([] if apart else self.large):
            shape, dtype = like[i]
            start = -(-self.sizes.get(dtype, 0) // ALIGNED) * ALIGNED
            self.sizes[dtype] = stop = start + self.counts[i]
            self.places[i] = dtype, start, stop
            if not shape:
                self.scalars[dtype] = stop

    def allocated(self, allocate: Any, large: Mapping[int, Any] | None = None) -> Flat:
        """Return memory by a function ``allocate(shape, dtype)``, beside some large arrays."""
        flat = {dtype: allocate((size,), dtype) for dtype, size in self.sizes.items()}
        views = {i: flat[dtype][start:stop].reshape(self.like[i][0]) for i, (dtype, start, stop) in self.places.items()}
        return Flat(flat, {**views, **(large or {})})

    def place(self, elements: Range) -> tuple[Any, int, int]:
        """Return the dtype and the place of elements of a sum."""
        dtype, start, _ = self.places[elements.number]
        return dtype, start + elements.start, start + elements.stop

    def part(self, memory: Flat, elements: Range) -> Any:
        """Return elements of a sum."""
        dtype, start, stop = self.place(elements)
        return memory.flat[dtype][start:stop]


def cut(ranges: Iterable[Range], limit: int) -> Iterator[list[Range]]:
    """Yield lists of the elements of ranges, of at most `limit` bytes each, with their places in memory for a list."""
    part: list[Range] = []
    places: collections.Counter[Any] = collections.Counter()
    free = limit
    for each in ranges:
        size, start = each.dtype.itemsize * ALIGNED, each.start
        while start < each.stop:
            stop = min(each.stop, start + free // size * ALIGNED)
            if stop > start:
                part.append(each._replace(start=start, stop=stop, place=places[each.dtype]))
                n = -(-(stop - start) // ALIGNED)
                places[each.dtype] += n * ALIGNED
                free -= n * size
            if stop < each.stop:
                yield part
                part, free, places = [], limit, collections.Counter()
            start = stop
    if part:
        yield part


class Block(NamedTuple):
    """A block of flat memory, which is fetched, added and sent while others are."""

    ranges: Sequence[Range]  # of the sums in it
    spans: dict[Any, slice]  # its elements of each flat array, by dtype

    def of(self, memory: Flat) -> list[Any]:
        """Return its part of each flat array."""
        return [memory.flat[dtype][span] for dtype, span in self.spans.items()]


def blocks_of(layout: Layout, limit: int) -> list[Block]:
    """Return blocks of at most `limit` bytes, at least one: consecutive elements of all flat arrays."""
    whole = [Range(i, dtype, 0, stop - start) for i, (dtype, start, stop) in layout.places.items()]
    blocks = []
    for ranges in cut(whole, max(limit, 16 * ALIGNED)):
        spans: dict[Any, slice] = {}
        for dtype, start, stop in map(layout.place, ranges):
            spans[dtype] = slice(spans[dtype].start if dtype in spans else start, stop)
        blocks.append(Block(ranges, spans))
    return blocks or [Block([], {})]
