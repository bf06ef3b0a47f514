"""The memory of a context, in which parts of sums are added, and from which the host fetches them."""
from __future__ import annotations

import contextlib
from typing import Any, Sequence

import numpy as np

from ..comm.tree import add_arrays, folded
from ..devices import page_locked
from ..devices.arena import ArenaFull
from ..devices.context_map import Context
from ..devices.copies import Elements, copies_of
from ..devices.processes import arena
from ..devices.transfers import DeviceMemory
from .layout import Block, Flat, Layout

BLOCK = 1 << 22  # bytes that are fetched, added and sent at a time


class OnHost:
    """The memory of the host."""

    def add(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the sums of lists of arrays: of the last list and the one before it first, and so on; None stays."""
        sums = [each if each is None else np.empty_like(each) for each in values[0]]
        for *terms, out in zip(*values, sums):
            if out is not None:
                add_arrays(terms, out)
        return sums


class OnDevice(DeviceMemory):
    """The memory of a context's device."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._kernels: dict[Any, Any] = {}
        self._any = self.empty((1,), 'float32')

    def wait(self) -> None:
        """Wait for all that the device has to do: libgpuarray waits for the stream of an array."""
        self._any.sync()

    def add(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the sums of lists of arrays, in new memory, as `OnHost.add`; each addition is rounded."""
        return [folded(terms, self._added) for terms in zip(*values)]

    def _added(self, one, other):
        total, size = self.empty(one.shape, one.dtype), (int(np.prod(one.shape, dtype='int64')),)
        if all(size):
            self.kernel(one.dtype, 'n0 + n1', 2)(*[self.contiguous(each).reshape(size)
                                                   for each in (total, one, other)])
        return total

    def kernel(self, dtype: Any, order: str, n: int) -> Any:
        """Return the kernel ``kernel(total, n0, n1, ...)`` that adds n arrays with one axis in an order."""
        key = dtype, order
        if key not in self._kernels:
            from pygpu.elemwise import GpuElemwise, arg  # not installed on every machine without a GPU
            terms = [arg('n%d' % i, dtype, read=True) for i in range(n)]
            total = arg('total', dtype, write=True)
            self._kernels[key] = GpuElemwise(self.context, 'total = ' + order, [total, *terms], nd=1, convert_f16=True)
        return self._kernels[key]


class Fetcher:
    """The fetching of a part of sums into flat memory on the host, block by block, again and again.

    Small arrays are put into one array on the device first, since each copy costs tens of microseconds, whatever its
    size; for large ones the further copy would cost more than it saves (`benchmarks/choices.py transfers`).
    """

    def __init__(self, context: Context, layout: Layout, blocks: Sequence[Block], here: Flat) -> None:
        self._layout, self.here = layout, here
        self._memory, self._copies = DeviceMemory(context), copies_of(context, len(blocks))
        self.is_beside = self._copies.is_beside
        self._packed = Layout(layout.like, apart=True)  # which has the small sums at the same places
        self._there = self._packed.allocated(self._memory.zeros)
        self._blocks = [list(self._places(block)) for block in blocks]

    def _places(self, block):
        """Yield pieces of a block, with the dtype of packed arrays, or the number of a large one, for the array."""
        for dtype, span in block.spans.items():
            stop = min(span.stop, self._packed.sizes.get(dtype, 0))
            if span.start < stop:
                yield dtype, span.start, self.here.flat[dtype][span.start:stop]
        for each in block.ranges:
            if each.number in self._layout.large:
                yield each.number, each.start, self._layout.part(self.here, each)

    def start(self, arrays: Sequence[Any]) -> None:
        """Begin to fetch arrays; some may be on the host already."""
        for i in self._layout.small:
            to, array = self._there.views[i], arrays[i]
            if to.ndim:
                to[...] = array
            else:  # pygpu indexes no scalars
                to.reshape((1,))[...] = array.reshape((1,))
        large = {i: self._memory.contiguous(arrays[i]).reshape((self._layout.counts[i],))
                 for i in self._layout.large}
        sources = {**self._there.flat, **large}
        self._copies.read([[Elements(sources[key], start, here) for key, start, here in block]
                           for block in self._blocks])

    def arrive(self, number: int) -> None:
        """Wait until a block is on the host."""
        self._copies.arrive(number)

    def drop(self) -> None:
        """Let go of arrays, once no copy is under way."""
        self._copies.drop()


class FetcherOnHost:
    """The twin of `Fetcher` for parts on the host."""

    is_beside = True

    def __init__(self, here: Flat) -> None:
        self.here = here

    def start(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays."""
        for i, array in enumerate(arrays):
            self.here.views[i][...] = array

    def arrive(self, number: int) -> None:
        """Wait for nothing."""

    def drop(self) -> None:
        """Let go of nothing."""


class Memories(dict):
    """The memory of each context, made when it is asked for.

    Sums may be `in_arena`, where processes of contexts take them.
    """

    block = BLOCK

    def __init__(self, in_arena: bool = False) -> None:
        super().__init__()
        self._in_arena = in_arena

    def __missing__(self, context: Context) -> Any:
        self[context] = memory = OnHost() if context.kind == 'cpu' else OnDevice(context)
        return memory

    def fetcher(self, context: Context, layout: Layout, blocks: Sequence[Block], here: Flat) -> Any:
        """Return a new fetcher from a context."""
        return FetcherOnHost(here) if context.kind == 'cpu' else Fetcher(context, layout, blocks, here)

    def on_host(self, shape: Sequence[int], dtype: Any, contexts: Sequence[Context]) -> Any:
        """Return new zeros on the host, for copies from and to contexts, maybe in the memory that processes share."""
        if self._in_arena:
            with contextlib.suppress(ArenaFull):
                array = arena().empty(shape, dtype, lasts=False)
                array[...] = 0
                return array
        return page_locked.zeros(tuple(shape), dtype, contexts)
