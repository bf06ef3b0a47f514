"""Sums over all samples that the devices add among themselves by NCCL; the host takes no part, and does not wait."""
from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ..comm.activities import ADD
from ..comm.collectives import all_gather_object
from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..devices.cuda_libraries.nccl import DTYPES, SUM
from ..devices.nccl import EVERY, Collectives, Copies, NcclCommunicator
from ..errors import ExchangeError, GraphError, warn
from .batch import DeviceSum, Shard
from .launcher import MemoryExplained, error_of
from .replicas.transfers import ALIGNED, SMALL, DeviceMemory, copy_to, describe, fetch
from .sums import HostSums
from .timeline import span


class Layout:
    """The places of sums on devices: small ones lie in one flat array a dtype, scalars first.

    Small arrays are copied into the flat array, added as one, and every device gets them. Large ones are added from
    where they are.

    Parameters
    ----------
    like : list of (shape, dtype)
    owners : list of (int or None)
        The device that alone gets a large sum, by its place among the devices of all ranks; None for every device.

    Attributes
    ----------
    sizes : dict of str to int
        Elements of each flat array, by its dtype.
    scalars : dict of str to int
        Elements that the scalars take at its beginning.
    places : dict of int to (dtype, start, stop)
        The place of each small array.
    copied, large : list of int
        Numbers of the small arrays that have elements, and of the large ones.
    owners : dict of int to int
        The device that alone gets a sum.
    names : list of str
        The dtype of each array that is exchanged: of the flat ones, then of the large ones.
    bytes, counts, dtypes, ops, roots : ndarray
        As for `Copies` and `Collectives`.
    """

    def __init__(self, like: Sequence[tuple[tuple[int, ...], np.dtype]], owners: Sequence[int | None] = ()) -> None:
        self.like = list(like)
        sizes = [int(np.prod(shape, dtype='int64')) for shape, _ in like]
        self.large = [i for i, (_, dtype) in enumerate(like) if sizes[i] * dtype.itemsize > SMALL]
        self.owners = {i: owner for i, owner in enumerate(owners) if owner is not None and i in self.large}
        self.sizes: dict[str, int] = {}
        self.scalars: dict[str, int] = {}
        self.places: dict[int, tuple[str, int, int]] = {}
        small = [i for i in range(len(like)) if i not in self.large]
        for i in sorted(small, key=lambda i: bool(like[i][0])):
            dtype = like[i][1].name
            start = -(-self.sizes.get(dtype, 0) // ALIGNED) * ALIGNED
            self.sizes[dtype] = start + sizes[i]
            self.places[i] = dtype, start, start + sizes[i]
            if not like[i][0]:
                self.scalars[dtype] = start + sizes[i]
        self.copied = [i for i in small if sizes[i]]
        self.bytes = np.array([sizes[i] * like[i][1].itemsize for i in self.copied], 'uint64')
        flat = [(dtype, size) for dtype, size in self.sizes.items() if size]
        self.flat_dtypes = [dtype for dtype, _ in flat]
        self.counts = np.array([size for _, size in flat] + [sizes[i] for i in self.large], 'uint64')
        self.names = self.flat_dtypes + [like[i][1].name for i in self.large]
        self.dtypes = np.array([DTYPES[name] for name in self.names], 'int32')
        self.ops = np.full(len(self.names), SUM, 'int32')
        self.roots = np.array([EVERY] * len(flat) + [self.owners.get(i, EVERY) for i in self.large], 'int32')

    def received(self, memory: DeviceMemory, place: int) -> Received:
        """Return new memory on a device for the sums that it gets, at its place among all devices."""
        return self.packed(memory, {i: memory.empty(*self.like[i]) for i in self.large
                                    if self.owners.get(i, place) == place})

    def packed(self, memory: DeviceMemory, large: Mapping[int, Any]) -> Received:
        """Return new memory on a device for small arrays, beside some large ones."""
        flat = {dtype: memory.empty((size,), dtype) for dtype, size in self.sizes.items()}
        views = {i: flat[dtype][start:stop].reshape(self.like[i][0]) for i, (dtype, start, stop) in self.places.items()}
        return Received(flat, {**views, **large})

    def arrays(self, received: Received) -> list[Any]:
        """Return the arrays that are exchanged, with one axis; None for a large one that is not there."""
        large = [received.views.get(i) for i in self.large]
        return [received.flat[dtype] for dtype in self.flat_dtypes] + \
            [each if each is None else each.reshape((int(np.prod(each.shape, dtype='int64')),)) for each in large]

    def exchange(self, parts: Sequence[Sequence[Any]],
                 every_received: Sequence[Received]) -> tuple[Copies, Collectives]:
        """Return the copies and collectives that put the sums of parts, a list for each device, where they belong."""
        to = [[received.views[i].gpudata for i in self.copied] for received in every_received]
        source = [[part[i].gpudata for i in self.copied] for part in parts]
        flat = [[received.flat[dtype].gpudata for dtype in self.flat_dtypes] for received in every_received]
        send = [own + [part[i].gpudata for i in self.large] for own, part in zip(flat, parts)]
        # Only the owner writes where a sum is received; the others name their part.
        receive = [own + [received.views.get(i, part[i]).gpudata for i in self.large]
                   for own, received, part in zip(flat, every_received, parts)]
        rows = [np.array(addresses, 'uint64').reshape(len(parts), -1) for addresses in (to, source, send, receive)]
        return (Copies(rows[0], rows[1], self.bytes),
                Collectives(rows[2], rows[3], self.counts, self.dtypes, self.ops, self.roots))


class Received(NamedTuple):
    """Sums on a device: flat arrays by dtype, and each sum by its number."""

    flat: dict[str, Any]
    views: dict[int, Any]


class Parts(NamedTuple):
    """The parts of sums that some replicas have: a list of arrays for each shard, with its context."""

    arrays: Sequence[Sequence[Any]]
    shards: Sequence[Shard]
    contexts: Sequence[Context]


class Reduced:
    """Sums of one step, on each device of some contexts.

    Parameters
    ----------
    layout : Layout
    every_received : list of Received
        The sums of each context.
    communicator : NcclCommunicator
    parts : Parts
        They name the samples of a device that is lost.
    """

    def __init__(self, layout: Layout, every_received: Sequence[Received], communicator: NcclCommunicator,
                 parts: Parts):
        self._layout, self._communicator = layout, communicator
        self._received = dict(zip(communicator.contexts, every_received))
        self._shards = dict(zip(parts.contexts, parts.shards))
        self._on_devices: dict[tuple[Context, int], Any] = {}
        self._on_host: dict[Any, Any] = {}

    def on(self, context: Context, number: int) -> Any:
        """Return a sum on a context's device; it may still be under way there."""
        key = context, number
        if key not in self._on_devices:
            self._on_devices[key] = copy_to(context, self._home(number, context).views[number])
        return self._on_devices[key]

    def _home(self, number, context=None):
        """Return the `Received` with a sum: of a context or the first one, if it is there, else of its owner."""
        received = self._received.get(context) or self._received[self._communicator.contexts[0]]
        if number in received.views:
            return received
        return next(each for each in self._received.values() if number in each.views)

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
        """Wait until every device of this process has the sums.

        Raises
        ------
        ReplicaError
            If a device is lost.
        ExchangeError
            If the exchange has failed otherwise.
        """
        with LossExplained(self._communicator, self._shards):
            self._communicator.wait()


class LossExplained:
    """A ``with`` block in which the ExchangeError of a lost device becomes a ReplicaError.

    Parameters
    ----------
    communicator : NcclCommunicator
    shards : dict of Context to Shard
        What the devices work on.
    """

    __slots__ = '_contexts', '_shards'

    def __init__(self, communicator: NcclCommunicator, shards: Mapping[Context, Shard]) -> None:
        self._contexts, self._shards = communicator.contexts, shards

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, ExchangeError) or error.context is None:
            return
        contexts, context, shard = self._contexts, error.context, self._shards.get(error.context)
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'exchange'
        raise error_of(error, contexts.index(context), context, where, shard.span if shard else None,
                       contexts) from error.__cause__


class DeviceSums(HostSums):
    """The sums of a SumGroup, which the devices add by NCCL.

    The first exchange of a communicator is compared with the host's sums. If they differ, or NCCL gives an error,
    sums go through the host from then on.

    Parameters
    ----------
    *of_host
        As for `HostSums`.
    communicator : NcclCommunicator
        Over the contexts that have parts, one for each replica.
    over_ranks : bool
        Whether other processes take part, too.
    """

    by_host = False
    _memory: Any = DeviceMemory  # of a context

    def __init__(self, *of_host: Any, communicator: NcclCommunicator, over_ranks: bool) -> None:
        super().__init__(*of_host)
        self._communicator, self._over_ranks = communicator, over_ranks
        self._layout = Layout([])
        self._parts: Parts | None = None     # until they are added
        self._arrays: list[list[Any]] = []   # the parts of every context of the communicator
        self._received: list[Received] = []  # memory for their sums
        self._reduced: Reduced | None = None  # of the step that is under way, until they are taken
        self._taken: Reduced | None = None    # until the step waits for them for the last time

    @property
    def is_ready(self) -> bool:
        """Return whether the next sums can be added by NCCL, as far as this process knows."""
        return not self._communicator.has_failed

    def use_host(self) -> None:
        """Have the sums that `add_over` is to add go through the host, because a rank cannot use NCCL any more."""
        parts = self._take_parts()
        if parts is not None:
            self._add_on_host(parts, None)

    def taken(self) -> Sequence[Any]:
        if self._reduced is None:
            return super().taken()
        self._taken, self._reduced = self._reduced, None
        return [DeviceSum(i, self._taken) for i in range(len(self._sources))]

    def finish(self) -> None:
        """Wait until the devices have added the sums; raise the error as `Reduced.wait` does."""
        for reduced in filter(None, (self._reduced, self._taken)):
            reduced.wait()
        self._taken = None

    def drop(self) -> None:
        super().drop()
        self._take_parts()
        self._reduced = self._taken = None

    def add_over(self, ranks: Communicator) -> None:
        if self._parts is None:
            super().add_over(ranks)
        else:
            self._reduce(ranks)

    def clear(self) -> None:
        if self._parts is None:
            super().clear()
        else:
            self._parts = self._parts._replace(arrays=[self._zeros(context, part) for context, part in
                                                       zip(self._parts.contexts, self._parts.arrays)])
            self._arrays = [self._zeros(context, part) for context, part in
                            zip(self._communicator.contexts, self._arrays)]

    def _add(self, parts, shards, contexts, accumulate, is_last):
        self._reduced = None
        self._parts = Parts(parts, shards, contexts)
        if self.is_ready:  # memory is allocated before other ranks begin to wait for this one
            self._prepare(self._parts)
        if not self._over_ranks:
            if self.is_ready:
                self._reduce(None)
            else:
                self.use_host()

    def _take_parts(self) -> Parts | None:
        """Return the parts, and let go of them and of the prepared memory."""
        parts, self._parts, self._arrays, self._received = self._parts, None, [], []
        return parts

    def _reduce(self, ranks):
        """Add the parts, by NCCL if that works."""
        arrays, received = self._arrays, self._received
        parts = self._take_parts()
        reduced = Reduced(self._layout, received, self._communicator, parts)
        if self._communicator.is_verified:
            with LossExplained(self._communicator, dict(zip(parts.contexts, parts.shards))):
                self._enqueue(arrays, received)
            error = ''
        else:
            error = self._verified(parts, arrays, received, ranks)
        if not error:
            self._reduced = reduced
            return
        warn('NCCL does not work here: %s. From now on, sums go through the host, which takes longer; the flag '
             'mgpu.collectives=host does so without a warning' % error)
        self._add_on_host(parts, ranks)

    def _add_on_host(self, parts, ranks):
        """Add parts through the host, over the ranks, too, if there are others."""
        super()._add(*parts, False, True)
        if ranks is not None:
            super().add_over(ranks)

    def _prepare(self, parts):
        """Keep the parts of every context of this process, in order, and memory for their sums.

        The part of a context that has no samples is 0.
        """
        part_of = dict(zip(parts.contexts, parts.arrays))
        self._use_layout(describe(parts.arrays[0]), part_of)
        self._arrays, self._received = [], []
        for i, context in enumerate(self._communicator.contexts):
            with MemoryExplained(i, context, 'exchange'):
                memory = self._memory(context)
                self._arrays.append(list(map(memory.contiguous, part_of[context])) if context in part_of else
                                    self._zeros(context, parts.arrays[0]))
                self._received.append(self._layout.received(memory, self._communicator.first + i))

    def _use_layout(self, like, part_of):
        """Lay out sums; raise a GraphError if the part of a context has other shapes."""
        if self._layout.like != like:
            self._layout = Layout(like, self._collective.owners)
        for context, part in part_of.items():
            if describe(part) != like:
                raise GraphError('the replicas have gradients, or other sums, of different shapes: %s, and on %s %s'
                                 % (like, context.name, describe(part)))

    def _zeros(self, context, arrays):
        """Return zeros on a context's device, of the shapes of some arrays."""
        return [self._memory(context).zeros(array.shape, array.dtype) for array in arrays]

    def _enqueue(self, arrays, received):
        with self._timings.span('all_reduce'), span('all_reduce', 'all_reduce'):
            self._communicator.exchange(*self._layout.exchange(arrays, received))

    def _verified(self, parts, arrays, received, ranks):
        """Add by NCCL and on the host, and compare; return how they differ, or the error, or an empty text."""
        lost = None
        try:
            self._enqueue(arrays, received)
            self._communicator.wait()
            error = ''
        except ExchangeError as failed:
            error, lost = str(failed), failed.context
        if lost is not None and ranks is None:  # a failure of the device, not of NCCL
            return error
        errors = [error] if ranks is None else all_gather_object(ranks, error)
        if not any(errors):
            error = next(filter(None, self._differences(parts, arrays, received, ranks)), '')
            errors = [error] if ranks is None else all_gather_object(ranks, error)
        error = next(filter(None, errors), '')
        if error:
            self._communicator.give_up()
        self._communicator.is_verified = not error
        return error

    def _differences(self, parts, arrays, received, ranks):
        """Return for each sum how it differs from the sum on the host; an empty text if it does not."""
        return [self._difference(arrays, received, i, ranks) for i in range(len(self._layout.like))]

    def _difference(self, arrays, received, i, ranks):
        """Return how the sum number i differs from the sum on the host, beyond rounding; an empty text if it does not.
        """
        parts = [fetch(part[i]).astype('float64').ravel() for part in arrays]
        total, scale = sum(parts), sum(map(abs, parts))
        if ranks is not None:
            ranks.handshake((ADD,))
            ranks.all_reduce([total, scale])
        sums = [fetch(each.views[i]).ravel() for each in received if i in each.views]
        if not sums:  # a device of another rank owns it
            return ''
        first, *others = sums
        if any(other.tobytes() != first.tobytes() for other in others):
            return 'the devices have different sums'
        limits = np.finfo(first.dtype)
        counts = np.isfinite(total) & (scale < limits.max / 4)
        error = abs(first[counts] - total[counts])
        n = len(arrays) * (ranks.size if ranks is not None else 1)
        if not (error <= n * (limits.eps * scale[counts] + limits.tiny)).all():
            return 'a sum differs from the sum on the host by %.3g, which is more than rounding' % np.nanmax(error)
        return ''
