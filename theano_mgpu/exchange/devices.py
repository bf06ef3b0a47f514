"""The channel of sums between devices by NCCL: the host compares the first sums, and takes no part from then on."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from ..comm.activities import ADD
from ..comm.collectives import all_gather_object
from ..comm.communicator import Communicator
from ..devices.context_map import HOST, Context
from ..devices.failures import FailureExplained, error_of
from ..devices.launcher import Shard
from ..devices.nccl import EVERY, Collectives, Copies, NcclCommunicator
from ..devices.nccl_library import DTYPES, SUM
from ..devices.transfers import copy_to, fetch
from ..errors import ExchangeError, warn
from ..utils.timeline import Timings, span
from ..utils.values import alike, beyond_rounding
from .host import HostChannel, Sum
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

    def arrays(self, number: int) -> list[Any]:
        """Return a sum on each device of this process that has it."""
        return [each.views[number] for each in self._received.values() if number in each.views]

    def value(self, number: int) -> Any:
        """Return a sum on the host; all scalars are fetched together."""
        if number not in self._on_host:
            self.wait()
            received = self._home(number)
            if self._layout.like[number][0]:
                self._on_host[number] = fetch(received.views[number])
            else:
                dtype, start, _ = self._layout.places[number]
                if dtype not in self._on_host:
                    self._on_host[dtype] = fetch(received.flat[dtype][:self._layout.scalars[dtype]])
                self._on_host[number] = self._on_host[dtype][start:start + 1].reshape(())
        return self._on_host[number]

    def wait(self) -> None:
        """Wait until the devices have the sums; raise an ExchangeError, or a ReplicaError for a lost device."""
        with LossExplained(self._communicator, self._shards):
            self._communicator.wait()


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


class Reduction:
    """The addition by NCCL itself, in any order."""

    def own(self, layout: NcclLayout, parts: Parts, context: Context, place: int, memory: Any) -> list[Any]:
        """Return the arrays that a context sends: its part, or zeros if it has no samples."""
        for part, other in zip(parts.arrays, parts.contexts):
            if other == context:
                return list(map(memory.contiguous, part))
        return [memory.zeros(*each) for each in layout.like]

    def enqueue(self, communicator: NcclCommunicator, layout: NcclLayout, every_own: Sequence[Any],
                every_received: Sequence[Flat]) -> None:
        """Enqueue the addition on all devices of this process."""
        communicator.exchange(*layout.exchange(every_own, every_received))


class NcclChannel:
    """A channel between the devices of all replicas, of all ranks.

    Its first sums are compared with the host's, to the bit if both add in one order (`is_exact`).
    If they differ, or NCCL fails, the host adds instead.
    """

    by_host = False

    def __init__(self, communicator: NcclCommunicator, owners: Sequence[int | None], adder: Any, memories: Any,
                 timings: Timings, host: HostChannel, is_exact: bool, ranks: Communicator) -> None:
        self._communicator, self._owners, self._adder = communicator, owners, adder
        self._memories, self._timings = memories, timings
        self._host, self._is_exact, self._ranks = host, is_exact, ranks
        self._layout = NcclLayout([])
        self._parts: Any = None
        self._own: list[Any] = []         # what every context of the communicator sends
        self._received: list[Flat] = []   # memory for the sums
        self._shards: dict[Context, Shard] = {}
        self._reduced: Reduced | None = None  # until a step waits for them for the last time
        self._is_taken = self._by_host = False

    @property
    def is_ready(self) -> bool:
        """Return whether the devices can add the next sums, as far as this process knows."""
        return not self._communicator.has_failed

    def prepare(self, parts: Parts) -> None:
        """Take parts; in a process alone, begin to add them."""
        self._parts, self._by_host = parts, not self.is_ready
        if not self._by_host:
            self._take(parts)
        if self._ranks.size == 1:
            self.add_over()

    def _take(self, parts):
        """Have memory for sums (or raise a ReplicaError), before other ranks begin to wait."""
        self._let_go()
        if self._layout.like != parts.like:
            self._layout = NcclLayout(parts.like, self._owners)
        self._shards = dict(zip(parts.contexts, parts.shards))
        for i, context in enumerate(self._communicator.contexts):
            with FailureExplained(i, context, 'exchange', self._communicator.contexts):
                memory, place = self._memories[context], self._communicator.first + i
                self._own.append(self._adder.own(self._layout, parts, context, place, memory))
                self._received.append(self._layout.received(memory, place))

    def use_host(self) -> None:
        """Have the host add the parts, because a rank cannot use NCCL any more."""
        self._let_go()
        self._by_host = True

    def add_over(self) -> None:
        """Add the parts, over the ranks, too, which have just had a handshake; raise a ReplicaError for a lost device.
        """
        parts, self._parts = self._parts, None
        if not self._by_host and self._communicator.is_verified:
            with LossExplained(self._communicator, self._shards):
                self._enqueue()
            return
        if not self._by_host:
            error = self._verified(parts)
            if not error:
                return
            warn('NCCL does not work here: %s. From now on, sums go through the host, which takes longer; the flag '
                 'mgpu.collectives=host does so without a warning' % error)
            self.use_host()
        self._on_host(parts, is_read=True)

    def _enqueue(self):
        """Enqueue the addition on all devices of this process; raise an ExchangeError if NCCL gives one."""
        own, received = self._own, self._received
        self._own, self._received = [], []
        self._reduced = Reduced(self._layout, received, self._communicator, self._shards)
        with self._timings.span('all_reduce'), span('all_reduce', 'all_reduce'):
            self._adder.enqueue(self._communicator, self._layout, own, received)

    def _on_host(self, parts, is_read=False):
        self._host.prepare(parts, is_read)
        if self._ranks.size > 1:
            self._ranks.handshake((ADD,))
        self._host.add_over()
        return self._host.views

    def _verified(self, parts):
        """Add by the devices and by the host; return how they differ, or an error, or an empty text."""
        error, lost = '', None
        try:
            self._enqueue()
            self._communicator.wait()
        except ExchangeError as caught:
            error, lost = str(caught), caught.context
        if lost and self._ranks.size == 1:  # a failure of the device, not of NCCL
            return error
        errors = all_gather_object(self._ranks, error)
        if not any(errors):
            errors = all_gather_object(self._ranks, next(filter(None, self._differences(parts)), ''))
        error = next(filter(None, errors), '')
        if error:
            self._communicator.give_up()  # no device of this process waits for others any more
        self._communicator.is_verified = not error
        self._host.drop()  # it may not be needed again
        return error

    def _differences(self, parts):
        """Yield for each sum how it differs from the host's; an empty text if it does not."""
        scales = [0] * len(parts.like)
        if not self._is_exact:
            absolute = [[abs(fetch(array)) for array in part] for part in parts.arrays]
            scales = list(map(np.copy, self._on_host(parts._replace(arrays=absolute, contexts=[HOST] * len(absolute)))))
        n = max(1, len(parts.arrays)) * self._ranks.size  # a rank without samples has no part
        for i, (total, scale) in enumerate(zip(self._on_host(parts), scales)):
            found = list(map(fetch, self._reduced.arrays(i)))
            if self._is_exact:
                yield '' if all(alike(its, total).all() for its in found) else 'a device has another sum than the host'
            elif any(its.tobytes() != found[0].tobytes() for its in found):
                yield 'the devices have different sums'
            elif found:
                error = beyond_rounding(found[0], total, scale, n)
                yield error and 'a sum differs from the sum on the host by %s, which is more than rounding' % error

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step; they may still be under way."""
        if self._by_host:
            return self._host.taken()
        self._is_taken = True
        return [Sum(i, self._reduced) for i in range(len(self._layout.like))]

    def finish(self) -> None:
        """Wait until the devices have added the sums; raise the error as `Reduced.wait` does."""
        if self._reduced is not None:
            self._reduced.wait()
            if self._is_taken:
                self._reduced = None

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices."""
        self._parts = None
        self._let_go()
        self._host.drop()

    def _let_go(self):
        self._own, self._received, self._reduced, self._is_taken = [], [], None, False
