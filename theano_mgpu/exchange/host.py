"""The channel of sums through the memory of the host, and over the ranks by MPI; and no channel at all."""
from __future__ import annotations

import functools
import time
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ..comm.communicator import Communicator
from ..comm.host_sum import bucket_ranges
from ..devices.context_map import HOST, Context
from ..devices.launcher import Launcher
from ..devices.transfers import FlatBuffers
from ..utils.timeline import HOST as HOST_TRACK
from ..utils.timeline import Timings, note, span
from ..utils.worker_threads import Task, WorkerThreads
from .orders import Parts

ALL = slice(None)


class Sum(NamedTuple):
    """A sum of a step: number `number` of what its channel has `reduced`."""

    number: int
    reduced: Any

    @property
    def value(self) -> Any:
        """The sum on the host."""
        return self.reduced.value(self.number)

    def on(self, context: Context) -> Any:
        """Return the sum where functions of a context take it."""
        return self.value if context.kind == 'cpu' else self.reduced.on(context, self.number)


class Stays:
    """No channel: the sums of the only replica stay where they are."""

    by_host = True

    def prepare(self, parts: Parts) -> None:
        """Take the sums."""
        self._sums: Sequence[Any] = parts.arrays[0]

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step."""
        sums, self._sums = self._sums, ()
        return sums

    def drop(self) -> None:
        """Free the arrays that a failed step has left."""
        self._sums = ()


class HostReduced:
    """The sums of one step on the host, and on the devices that they were sent to."""

    def __init__(self, channel: HostChannel, views: Sequence[np.ndarray]) -> None:
        self._channel, self._views = channel, views
        self._on_devices: dict[Context, dict[int, Any]] = {}

    def value(self, number: int) -> np.ndarray:
        """Return a sum on the host."""
        return self._views[number]

    def on(self, context: Context, number: int) -> Any:
        """Return a sum on a context's device; all that the context reads are sent together."""
        if context not in self._on_devices:
            self._on_devices[context] = self._channel.send(context, self._views)
        return self._on_devices[context][number]


class HostChannel:
    """A channel through memory on the host that every step uses again, and over the ranks.

    Parameters
    ----------
    order : AnyOrder or TreeOrder
    owners : list of int
        The rank that alone gets each sum; empty if every rank gets them.
    half : bool
        Whether the ranks exchange float16.
    read_on : dict of Context to (list of int)
        The numbers of the sums that are read on each context: they are sent there.
    memories : Memories
    launcher : Launcher
    timings : Timings

    Attributes
    ----------
    views : list of ndarray
        Each sum; valid until the next step. None for one that another rank owns.
    by_host : bool
        Whether it is the host that adds the sums.
    """

    by_host = True

    def __init__(self, order: Any, owners: Sequence[Any], half: bool, read_on: Mapping[Context, Sequence[int]],
                 memories: Any, launcher: Launcher, timings: Timings) -> None:
        self._order, self._owners, self._half, self._read_on = order, owners, half, read_on
        self._memories, self._launcher, self._timings = memories, launcher, timings
        self._device = next((context for context in read_on if context.kind != 'cpu'), None)
        self._buffers: list[FlatBuffers] = []
        self._fetchers: dict[Any, Any] = {}
        self._underway: list[Task] = []
        self._sent_to: set[Context] = set()
        self.views: Sequence[Any] = []

    def prepare(self, parts: Parts) -> None:
        """Add parts on the host; large arrays on another thread, while the next ones come from the devices."""
        if self._underway:  # an interrupted step may have left some, which add to the same memory
            self._thread.finish(self._underway)
            self._underway = []
        n = self._order.n_nodes
        is_other = len(self._buffers) < n or self._buffers[0].like != parts.like
        # These may still read this memory. The others are waited for when they give their parts.
        idle = sorted(self._sent_to if is_other else self._sent_to.difference(parts.contexts)) if self._sent_to else []
        if idle:
            self._launcher.run('device_to_host', [self._memories[context].wait for context in idle], idle)
        self._sent_to.clear()
        if is_other:
            self._buffers = [FlatBuffers(parts.like, self._allocate) for _ in range(n)]
        self.views = self._buffers[0].views
        if not self._memories.computes:
            return
        if self._device is None:
            began = time.perf_counter()
            self._add(parts, parts.arrays, ALL)
            note(self._timings.seconds, 'all_reduce', HOST_TRACK, began)
        elif parts.arrays:
            self._add_from_devices(parts)

    def _add_from_devices(self, parts):
        if self._owners and len(parts.arrays) == 1 and self._order.is_any:  # each is a message, from where it lies
            self.views, = self._fetched(parts, ALL)
            return
        *others, last = bucket_ranges([each.nbytes for each in self.views])
        for bucket in others:
            self._underway.append(Task(parts, self._fetched(parts, slice(*bucket)), slice(*bucket)))
            self._thread.submit(self._underway[-1])
        arrays = self._fetched(parts, slice(*last))
        with self._timings.span('all_reduce'):
            self._add(parts, arrays, slice(*last))
            for task in self._underway:
                task.result()

    def _allocate(self, shape, dtype):
        return self._memories.on_host(shape, dtype, self._device or HOST)

    def _add(self, parts, arrays, numbers):
        self._order.add_up(parts, arrays, [each.views[numbers] for each in self._buffers], numbers)

    @functools.cached_property
    def _thread(self):
        return WorkerThreads([self._add_beside], 'theano_mgpu all_reduce')

    def _add_beside(self, *given):
        with span('all_reduce', 'all_reduce'):
            self._add(*given)

    def _fetched(self, parts, numbers):
        """Return some arrays of each part, on the host."""
        fetchers = [self._fetchers.setdefault((i, context, numbers.start), self._memories.fetcher(context))
                    for i, context in enumerate(parts.contexts)]
        arrays: Any = [part[numbers] for part in parts.arrays]
        for tasks in ([functools.partial(fetcher.start, part) for fetcher, part in zip(fetchers, arrays)],
                      [fetcher.finish for fetcher in fetchers]):
            arrays = self._launcher.run('device_to_host', tasks, parts.contexts, parts.shards)
        return arrays

    def add_over(self, ranks: Communicator) -> None:
        """Add the sums over the ranks, which have just had a handshake."""
        self.views = self._order.add_over(ranks, self._buffers, self.views, self._owners, self._half)

    def clear(self) -> None:
        """Make every sum 0, on a rank without samples."""
        for buffers in self._buffers:
            for flat in buffers.flat.values():
                flat[...] = 0
        self.views = self._buffers[0].views

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step: copies on devices are freed with them."""
        if self._device is None:
            return self.views
        reduced = HostReduced(self, self.views)
        return [Sum(i, reduced) for i in range(len(self.views))]

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices."""
        self._fetchers.clear()

    def send(self, context: Context, views: Sequence[Any]) -> dict[int, Any]:
        """Return the sums that are read on a context, by number, on its device.

        Those that lie next to each other are sent in one copy.
        """
        memory, whole = self._memories[context], self._buffers[0]
        sent: dict[int, Any] = {}
        self._sent_to.add(context)
        for numbers in _runs(self._read_on[context]):
            there = FlatBuffers([whole.like[i] for i in numbers], memory.empty)
            sent.update(zip(numbers, there.views))
            if views[numbers[0]] is not whole.views[numbers[0]]:  # an owner's, from where they lie
                for i, view in zip(numbers, there.views):
                    view.write(np.ascontiguousarray(views[i]))
                continue
            starts = {whole.like[i][1]: whole.places[i].start for i in reversed(numbers)}
            for dtype, to in there.flat.items():
                to.write(whole.flat[dtype][starts[dtype]:starts[dtype] + to.shape[0]])
        return sent


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers in lists of consecutive ones.

    Examples
    --------
    >>> _runs([1, 2, 5])
    [[1, 2], [5]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return runs
