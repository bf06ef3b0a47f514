"""The channel of sums through the memory of the host, and over the ranks by MPI; and no channel at all."""
from __future__ import annotations

import functools
import itertools
import sys
from typing import Any, Collection, Mapping, NamedTuple, Sequence

import numpy as np

from ..comm.communicator import Communicator
from ..devices.context_map import HOST, Context
from ..devices.copies import Elements, copies_of
from ..devices.failures import FailureExplained
from ..devices.launcher import Launcher
from ..utils.timeline import Timings, span
from ..utils.worker_threads import Task, WorkerThreads
from .layout import Block, Flat, Layout, blocks_of
from .orders import Parts


class Sum(NamedTuple):
    """A sum of a step: number `number` of what its channel has `reduced`."""

    number: int
    reduced: Any

    def on(self, context: Context) -> Any:
        """Return the sum where functions of a context take it."""
        return self.reduced.value(self.number) if context.kind == 'cpu' else self.reduced.on(context, self.number)


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


class HostReduced(NamedTuple):
    """The sums of one step on the host, and on the devices that they were sent to."""

    views: Sequence[Any]
    sent: Mapping[Context, Sent]

    def value(self, number: int) -> np.ndarray:
        """Return a sum on the host."""
        return self.views[number]

    def on(self, context: Context, number: int) -> Any:
        """Return a sum on a context's device."""
        return self.sent[context].views[number]


class Sent:
    """The sums that one context reads, on its device: those that lie next to each other are one array."""

    def __init__(self, layout: Layout, runs: Sequence[Sequence[int]], memory: Any, copies: Any) -> None:
        self._copies = copies
        self._runs: list[Any] = []  # of dtype, start, stop, array
        self.views: dict[int, Any] = {}
        for run in runs:
            (dtype, start, _), (_, _, stop) = [layout.places[i] for i in (run[0], run[-1])]
            array = memory.empty((stop - start,), dtype)
            self._runs.append((dtype, start, stop, array))
            for i in run:
                _, first, last = layout.places[i]
                self.views[i] = array[first - start:last - start].reshape(layout.like[i][0])
        copies.follow()

    def write(self, block: Block, flat: Mapping[Any, np.ndarray]) -> None:
        """Begin to write a block of the sums."""
        pieces = []
        for dtype, start, stop, array in self._runs:
            span = block.spans.get(dtype, slice(0, 0))
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                pieces.append(Elements(array, first - start, flat[dtype][first:last]))
        self._copies.write(pieces)


class HostChannel:
    """A channel through memory on the host that every step uses again, and over the ranks: a pipeline of blocks.

    While a block comes from the devices, the one before is added, and the one before that goes over the ranks and back
    to the devices. The ranks (and not replicas) that alone get a sum are its `owners`; without any, every rank gets
    all. `read_on` has the numbers of the sums that are sent to each context.
    """

    by_host = True

    def __init__(self, order: Any, owners: Sequence[Any], read_on: Mapping[Context, Sequence[int]], memories: Any,
                 launcher: Launcher, timings: Timings, ranks: Communicator) -> None:
        self._order, self._owners, self._ranks = order, owners, ranks
        self._memories, self._launcher, self._timings = memories, launcher, timings
        self._read_on = {context: numbers for context, numbers in read_on.items() if context.kind != 'cpu'}
        self._contexts = list(self._read_on)  # none if all are of the CPU
        self._layout, self._blocks = Layout([]), [Block([], {})]
        self._buffers: list[Flat] = []  # the sums, for each node that remains
        self._fetchers: dict[Any, Any] = {}
        self._runs: dict[Context, list[list[int]]] = {}  # of the sums that each context reads
        self._copies: dict[Context, Any] = {}  # to the devices
        self._underway: list[Task] = []
        self._sent: dict[Context, Sent] = {}
        self._sent_to: set[Context] = set()
        self._every_view: list[list[Any]] = []
        self.views: Sequence[Any] = []  # valid until the next step; None for a sum that another rank owns

    def prepare(self, parts: Parts) -> None:
        """Take parts, and memory for the sums, and begin to fetch; several blocks are added on another thread."""
        self._end_additions()  # an interrupted step may have left some, to the same memory
        self._use(parts)
        self._sent = {context: self._memory_on(context) for context in self._read_on}
        (self._fetch if self._contexts else self._add_on_host)(parts)

    def _add_on_host(self, parts):
        with self._timings.span('all_reduce'):
            self._order.add_up(parts, parts.arrays, self._every_view)

    def _use(self, parts):
        """Have buffers for parts that no device reads any more."""
        n = self._order.n_nodes
        is_other = len(self._buffers) < n or self._layout.like != parts.like
        # These may still read this memory. The others are waited for when they give their parts.
        idle = sorted(self._sent_to if is_other else self._sent_to.difference(parts.contexts)) if self._sent_to else []
        if idle:
            self._launcher.run('device_to_host', [self._memories[context].wait for context in idle], idle)
        self._sent_to.clear()
        if is_other:
            self._layout = Layout(parts.like)
            self._blocks = blocks_of(self._layout, self._memories.block if self._contexts else sys.maxsize)
            self._buffers = [self._layout.allocated(self._allocate) for _ in range(n)]
            self._every_view = [[each.views[i] for i in range(len(parts.like))] for each in self._buffers]
            self._fetchers.clear()
            self._runs = {context: _runs(self._layout, numbers) for context, numbers in self._read_on.items()}
            self._copies.clear()
        self.views = self._every_view[0]

    def _allocate(self, shape, dtype):
        return self._memories.on_host(shape, dtype, self._contexts or [HOST])

    def _memory_on(self, context):
        self._sent_to.add(context)
        with FailureExplained(self._contexts.index(context), context, 'exchange', self._contexts):
            if context not in self._copies:
                self._copies[context] = copies_of(context, len(self._blocks))
            return Sent(self._layout, self._runs[context], self._memories[context], self._copies[context])

    def _fetch(self, parts):
        """Begin to fetch parts, and add them as their blocks arrive; errors come here, or in `add_over`."""
        fetchers = [self._fetcher(i, context, len(parts.arrays) == len(self._buffers) == 1)
                    for i, context in enumerate(parts.contexts)]
        tasks = [functools.partial(fetcher.start, part) for fetcher, part in zip(fetchers, parts.arrays)]
        self._launcher.run('device_to_host', tasks, parts.contexts, parts.shards)
        last = len(self._blocks) - 1
        for number in range(last + 1):
            arrivals = [functools.partial(each.arrive, number) for each in fetchers]
            arrive = functools.partial(self._launcher.run, 'device_to_host', arrivals, parts.contexts, parts.shards)
            if not last or not all(each.is_beside for each in fetchers):
                arrive()
                arrive = None
            self._underway.append(Task(arrive, functools.partial(self._add, parts, fetchers, number)))
            if last:
                self._thread.submit(self._underway[-1])
            else:
                self._underway[-1].run(_add_block)

    def _fetcher(self, i, context, is_alone):
        key = i, context, is_alone
        if key not in self._fetchers:
            here = self._buffers[0] if is_alone else self._layout.allocated(self._allocate)
            self._fetchers[key] = self._memories.fetcher(context, self._layout, self._blocks, here)
        return self._fetchers[key]

    def _add(self, parts, fetchers, number):
        if not fetchers or fetchers[0].here is not self._buffers[0]:
            block = self._blocks[number]
            with self._timings.span('all_reduce'):
                self._order.add_up(parts, [block.of(each.here) for each in fetchers],
                                   [block.of(each) for each in self._buffers])

    @functools.cached_property
    def _thread(self):
        return WorkerThreads([_add_block], 'theano_mgpu all_reduce')

    def add_over(self) -> None:
        """Add the sums over the ranks, which have just had a handshake, and send them to the devices.

        After an error in a block, this rank takes part in the additions of the others: these hear of the error in the
        next handshake.
        """
        error, n = None, len(self._blocks)
        for number in range(n + 1):
            try:
                if number and error is None:
                    self._send(number - 1)
                if number < n and error is None and self._underway:
                    self._underway[number].result()
            except BaseException as caught:
                error = caught
            if number < n and self._ranks.size > 1:
                self._add_block_over(self._blocks[number])
        if error is not None:  # other blocks may still be under way
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        self._underway = []
        if self._owners:
            self.views = [view if owner == self._ranks.rank else None for view, owner in zip(self.views, self._owners)]

    def _add_block_over(self, block):
        if self._owners:
            owners = [self._owners[each.number] for each in block.ranges]
            arrays = [[self._layout.part(buffer, each) for each in block.ranges] for buffer in self._buffers]
        else:
            owners, arrays = (), list(map(block.of, self._buffers))
        self._order.add_over(self._ranks, arrays, owners)

    def _send(self, number):
        for i, (context, sent) in enumerate(self._sent.items()):
            with FailureExplained(i, context, 'exchange', self._contexts):
                sent.write(self._blocks[number], self._buffers[0].flat)
                if number == len(self._blocks) - 1:
                    self._copies[context].written()

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step: copies on devices are freed with them."""
        if not self._contexts:
            return self.views
        if self._underway:  # in a process alone
            self.add_over()
        reduced, self._sent = HostReduced(self.views, self._sent), {}
        return [Sum(i, reduced) for i in range(len(self.views))]

    def _end_additions(self):
        if self._underway:
            self._thread.finish(self._underway)
            self._underway = []

    def drop(self) -> None:
        """Free all memory, also the arrays that a failed step has left on the devices."""
        self._end_additions()
        for each in [*self._fetchers.values(), *self._copies.values()]:
            each.drop()
        self._fetchers.clear()
        self._sent, self._buffers, self._every_view, self.views = {}, [], [], []


def _add_block(arrive, add):
    """Wait for a block, if it is still under way, and add it."""
    if arrive is not None:
        arrive()
    with span('all_reduce', 'all_reduce'):
        add()


def _runs(layout: Layout, numbers: Collection[int]) -> list[list[int]]:
    """Return numbers of sums in lists of neighbours in flat memory.

    >>> like = [((n,), np.dtype(dtype)) for n, dtype in ((3, 'f4'), (2, 'f8'), (4, 'f4'), (1, 'f4'))]
    >>> _runs(Layout(like), [0, 1, 2]), _runs(Layout(like), [0, 3])
    ([[0, 2], [1]], [[0], [3]])
    """
    runs = []
    for dtype in layout.sizes:
        neighbours = [i for i, place in layout.places.items() if place[0] == dtype]
        for is_wanted, run in itertools.groupby(neighbours, numbers.__contains__):
            if is_wanted:
                runs.append(list(run))
    return runs
