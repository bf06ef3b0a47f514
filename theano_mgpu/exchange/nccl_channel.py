"""The channel of sums between devices by NCCL: the host takes no part."""
from __future__ import annotations

import contextlib
from typing import Any, Mapping, Sequence

import numpy as np

from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..devices.exchange_operations import EVERY, Collectives, Copies
from ..devices.failures import FailureExplained, error_of
from ..devices.launcher import Shard
from ..devices.nccl import ALL, NcclCommunicator
from ..devices.nccl_library import DTYPES, SUM
from ..devices.transfers import copy_to, fetch
from ..errors import ExchangeError
from ..utils.timeline import Timings, span
from .host import Sum
from .layout import Flat, Layout
from .orders import Parts


class NcclLayout(Layout):
    """A layout for NCCL: large sums lie apart, and each small sum is for every device.

    An owner is the device that alone gets a large sum, by its place among the devices of all ranks. The arrays that are
    exchanged are the flat ones, then the large ones; their numbers are as in `Copies` and `Collectives`.
    """

    def __init__(self, like: Sequence[tuple[tuple[int, ...], np.dtype]], owners: Sequence[int | None] = ()) -> None:
        super().__init__(like, apart=True)
        self.owners = {i: owner for i, owner in enumerate(owners) if owner is not None and i in self.large}
        self.bytes = np.array([self.counts[i] * like[i][1].itemsize for i in self.small], 'uint64')
        self.flat_dtypes = [dtype for dtype, size in self.sizes.items() if size]
        self.dtypes = self.flat_dtypes + [like[i][1] for i in self.large]
        self.lengths = np.array([self.sizes[dtype] for dtype in self.flat_dtypes] +
                                 [self.counts[i] for i in self.large], 'uint64')
        self.numbers = np.array([DTYPES[dtype.name] for dtype in self.dtypes], 'int32')
        self.ops = np.full(len(self.dtypes), SUM, 'int32')
        self.roots = np.array([EVERY] * len(self.flat_dtypes) + [self.owners.get(i, EVERY) for i in self.large],
                              'int32')

    def received(self, memory: Any, place: int) -> Flat:
        """Return new memory on a device for the sums that it gets, at its place among all devices."""
        return self.allocated(memory.empty, {i: memory.empty(*self.like[i]) for i in self.large
                                             if self.owners.get(i, place) == place})

    def arrays(self, memory: Flat) -> list[Any]:
        """Return the arrays that are exchanged, with one axis; None for a large one that is not there."""
        large = [memory.views.get(i) for i in self.large]
        return [memory.flat[dtype] for dtype in self.flat_dtypes] + \
            [each if each is None else each.reshape((self.counts[i],)) for i, each in zip(self.large, large)]

    def exchange(self, parts: Sequence[Sequence[Any]], every_received: Sequence[Flat]) -> tuple[Copies, Collectives]:
        """Return the copies and collectives that put the sums of parts, a list for each device, where they belong."""
        to = [[received.views[i].gpudata for i in self.small] for received in every_received]
        source = [[part[i].gpudata for i in self.small] for part in parts]
        flat = [[received.flat[dtype].gpudata for dtype in self.flat_dtypes] for received in every_received]
        send = [own + [part[i].gpudata for i in self.large] for own, part in zip(flat, parts)]
        # Only the owner writes where a sum is received; the others name their part.
        receive = [own + [received.views.get(i, part[i]).gpudata for i in self.large]
                   for own, received, part in zip(flat, every_received, parts)]
        rows = [np.array(addresses, 'uint64').reshape(len(parts), -1) for addresses in (to, source, send, receive)]
        return (Copies(rows[0], rows[1], self.bytes),
                Collectives(rows[2], rows[3], self.lengths, self.numbers, self.ops, self.roots))


class Reduced:
    """Sums of one step, on each device of some contexts; the shards name the samples of a device that is lost."""

    def __init__(self, layout: NcclLayout, every_received: Sequence[Flat], communicator: NcclCommunicator,
                 shards: Mapping[Context, Shard]):
        self._layout, self._communicator, self._shards = layout, communicator, shards
        self._received = dict(zip(communicator.contexts, every_received))
        self._on_devices: dict[tuple[Context, int], Any] = {}
        self._on_host: dict[Any, Any] = {}

    def on(self, context: Context, number: int) -> Any:
        """Return a sum on a context's device; it may still be under way there."""
        key = context, number
        if key not in self._on_devices:
            self._on_devices[key] = copy_to(context, self._home(number, context).views[number])
        return self._on_devices[key]

    def _home(self, number, context=None):
        """Return the `Flat` with a sum: of a context or the first one, if it is there, else of its owner."""
        received = self._received.get(context) or self._received[self._communicator.contexts[0]]
        if number in received.views:
            return received
        return next(each for each in self._received.values() if number in each.views)

    def value(self, number: int) -> Any:
        """Return a sum on the host; all scalars are fetched together."""
        if number not in self._on_host:
            with LossExplained(self._communicator, self._shards):
                self._communicator.wait()
            received = self._home(number)
            if self._layout.like[number][0]:
                self._on_host[number] = fetch(received.views[number])
            else:
                dtype, start, _ = self._layout.places[number]
                if dtype not in self._on_host:
                    self._on_host[dtype] = fetch(received.flat[dtype][:self._layout.scalars[dtype]])
                self._on_host[number] = self._on_host[dtype][start:start + 1].reshape(())
        return self._on_host[number]


class LossExplained:
    """A ``with`` block in which the ExchangeError of a lost device becomes a ReplicaError, with its shard."""

    __slots__ = '_contexts', '_shards'

    def __init__(self, communicator: NcclCommunicator, shards: Mapping[Context, Shard]) -> None:
        self._contexts, self._shards = communicator.contexts, shards

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, ExchangeError) or error.context is None:
            return
        contexts, context, shard = self._contexts, error.context, self._shards.get(error.context)
        raise error_of(error, contexts.index(context), context, 'exchange', contexts,
                       shard.span if shard else None) from error.__cause__


class NcclSum:
    """The addition by NCCL itself, in any order."""

    def own(self, layout: NcclLayout, parts: Parts, context: Context, place: int, memory: Any) -> list[Any]:
        """Return the arrays that a context sends: its part, or zeros if it has no samples."""
        for part, other in zip(parts.arrays, parts.contexts):
            if other == context:
                return list(map(memory.contiguous, part))
        return [memory.zeros(*each) for each in layout.like]

    def enqueue(self, communicator: NcclCommunicator, layout: NcclLayout, every_own: Sequence[Any],
                every_received: Sequence[Flat]) -> int:
        """Enqueue the addition on all devices of this process; return the number of the exchange, which is beside them.
        """
        return communicator.begin(*layout.exchange(every_own, every_received))


class NcclChannel:
    """A channel between the devices of all replicas, of all ranks."""

    by_host = False

    def __init__(self, communicator: NcclCommunicator, owners: Sequence[int | None], adder: Any, memories: Any,
                 timings: Timings, ranks: Communicator) -> None:
        self._communicator, self._owners, self._adder = communicator, owners, adder
        self._memories, self._timings, self._ranks = memories, timings, ranks
        self._layout = NcclLayout([])
        self._own: list[Any] = []         # what every context of the communicator sends, until the sums are taken
        self._received: list[Flat] = []   # memory for the sums
        self._number = ALL                # of the exchange
        self._shards: dict[Context, Shard] = {}
        self._reduced: Reduced | None = None  # until a step takes them

    def prepare(self, parts: Parts) -> None:
        """Take parts, and memory for sums (or raise a ReplicaError), before other ranks begin to wait.

        In a process alone, begin to add them.
        """
        self.drop()
        if self._layout.like != parts.like:
            self._layout = NcclLayout(parts.like, self._owners)
        self._shards = dict(zip(parts.contexts, parts.shards))
        for i, context in enumerate(self._communicator.contexts):
            with FailureExplained(i, context, 'exchange', self._communicator.contexts):
                memory, place = self._memories[context], self._communicator.first + i
                self._own.append(self._adder.own(self._layout, parts, context, place, memory))
                self._received.append(self._layout.received(memory, place))
        if self._ranks.size == 1:
            self.add_over()

    def add_over(self) -> None:
        """Enqueue the addition on all devices, over the ranks, too, which have just had a handshake.

        Raise an ExchangeError if NCCL gives one, or a ReplicaError for a lost device.
        """
        self._reduced = Reduced(self._layout, self._received, self._communicator, self._shards)
        with LossExplained(self._communicator, self._shards), self._timings.span('all_reduce'), \
                span('all_reduce', 'all_reduce'):
            self._number = self._adder.enqueue(self._communicator, self._layout, self._own, self._received)

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step; they may still be under way, before all that the devices are given to compute.
        """
        with LossExplained(self._communicator, self._shards):
            self._communicator.join(self._number)
        reduced, self._reduced, self._own, self._received = self._reduced, None, [], []
        return [Sum(i, reduced) for i in range(len(self._layout.like))]

    def finish(self) -> None:
        """Wait until the devices have the sums; raise an ExchangeError, or a ReplicaError for a lost device."""
        with LossExplained(self._communicator, self._shards):
            self._communicator.wait()

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices, in the order of what these compute."""
        if self._own:
            with contextlib.suppress(ExchangeError):  # a lost device writes nothing more
                self._communicator.join()
        self._own, self._received, self._reduced = [], [], None
