"""Sums over all samples that the devices add among themselves by NCCL; the host takes no part, and does not wait."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from ..comm.activities import ADD
from ..comm.collectives import all_gather_object
from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..devices.contexts import gpu_context
from ..devices.nccl import Copies, NcclCommunicator, Reductions, numbers_of
from ..errors import ExchangeError, GraphError, warn
from .batch import DeviceSum, Shard, Values
from .launcher import error_of
from .replicas.transfers import ALIGNED, SMALL, copy_to, describe, fetch
from .sums import HostSums
from .timeline import span


class Layout:
    """The places of arrays in one flat array a dtype: scalars first, then small arrays, then large ones.

    Small arrays are copied into the flat array, and added as one. Large ones are added from where they are.

    Parameters
    ----------
    like : list of (shape, dtype)

    Attributes
    ----------
    sizes : dict of str to int
        Elements of each flat array, by its dtype.
    scalars : dict of str to int
        Elements that the scalars take at its beginning.
    places : list of (dtype, start, stop)
        The place of each array.
    copied, direct : list of int
        Numbers of the small arrays, and of the large ones.
    bytes, counts, dtypes, ops : ndarray
        As for `Copies` and `Reductions`.
    """

    def __init__(self, like: Sequence[tuple[tuple[int, ...], np.dtype]]) -> None:
        self.like = list(like)
        sizes = [int(np.prod(shape, dtype='int64')) for shape, _ in like]
        small = [size * dtype.itemsize <= SMALL for size, (_, dtype) in zip(sizes, like)]
        self.sizes: dict[str, int] = {}
        self.scalars: dict[str, int] = {}
        places: dict[int, tuple[str, int, int]] = {}
        prefixes: dict[str, int] = {}
        for i in sorted(range(len(like)), key=lambda i: (bool(like[i][0]), not small[i])):
            dtype = like[i][1].name
            start = -(-self.sizes.get(dtype, 0) // ALIGNED) * ALIGNED
            self.sizes[dtype] = start + sizes[i]
            places[i] = dtype, start, start + sizes[i]
            if small[i]:
                prefixes[dtype] = start + sizes[i]
            if not like[i][0]:
                self.scalars[dtype] = start + sizes[i]
        self.places = [places[i] for i in range(len(like))]
        self.copied = [i for i in range(len(like)) if small[i] and sizes[i]]
        self.direct = [i for i in range(len(like)) if not small[i]]
        self.prefixes = [dtype for dtype, size in prefixes.items() if size]
        self.bytes = np.array([sizes[i] * like[i][1].itemsize for i in self.copied], 'uint64')
        self.counts = np.array([prefixes[dtype] for dtype in self.prefixes] + [sizes[i] for i in self.direct], 'uint64')
        names = self.prefixes + [like[i][1].name for i in self.direct]
        self.dtypes, self.ops = numbers_of(names, ['sum'] * len(names))

    def empty(self, context: Context) -> dict[str, Any]:
        """Return new flat arrays on a context's device."""
        from pygpu import gpuarray
        return {dtype: gpuarray.empty((size,), dtype, context=gpu_context(context))
                for dtype, size in self.sizes.items()}

    def address(self, flat: dict[str, Any], i: int) -> int:
        """Return the address of an array in flat arrays."""
        dtype, start, _ = self.places[i]
        return flat[dtype].gpudata + start * np.dtype(dtype).itemsize

    def view(self, flat: dict[str, Any], i: int) -> Any:
        """Return an array in flat arrays."""
        dtype, start, stop = self.places[i]
        return flat[dtype][start:stop].reshape(self.like[i][0])

    def exchange(self, parts: Sequence[Sequence[Any]], flats: Sequence[dict[str, Any]]) -> tuple[Copies, Reductions]:
        """Return the copies and reductions that put the sums of parts, a list for each device, into flat arrays."""
        n = len(parts)
        to = [self.address(flat, i) for flat in flats for i in self.copied]
        source = [part[i].gpudata for part in parts for i in self.copied]
        send, receive = [], []
        for part, flat in zip(parts, flats):
            prefixes = [flat[dtype].gpudata for dtype in self.prefixes]
            send += prefixes + [part[i].gpudata for i in self.direct]
            receive += prefixes + [self.address(flat, i) for i in self.direct]
        rows = [np.array(addresses, 'uint64').reshape(n, -1) for addresses in (to, source, send, receive)]
        return (Copies(rows[0], rows[1], self.bytes),
                Reductions(rows[2], rows[3], self.counts, self.dtypes, self.ops))


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
    flats : list of dict of str to pygpu.gpuarray.GpuArray
        The flat arrays of each context.
    communicator : NcclCommunicator
    parts : Parts
        They name the samples of a device that is lost.
    """

    def __init__(self, layout: Layout, flats: Sequence[dict[str, Any]], communicator: NcclCommunicator, parts: Parts):
        self._layout, self._communicator = layout, communicator
        self._flats = dict(zip(communicator.contexts, flats))
        self._shards = dict(zip(parts.contexts, parts.shards))
        self._on_devices: dict[tuple[Context, int], Any] = {}
        self._on_host: dict[Any, Any] = {}

    def on(self, context: Context, number: int) -> Any:
        """Return a sum on a context's device; it may still be under way there."""
        key = context, number
        if key not in self._on_devices:
            home = context if context in self._flats else self._communicator.contexts[0]
            self._on_devices[key] = copy_to(context, self._layout.view(self._flats[home], number))
        return self._on_devices[key]

    def value(self, number: int) -> Any:
        """Return a sum on the host; all scalars are fetched together."""
        if number not in self._on_host:
            self.wait()
            flat = self._flats[self._communicator.contexts[0]]
            dtype, start, _ = self._layout.places[number]
            if self._layout.like[number][0]:
                self._on_host[number] = fetch(self._layout.view(flat, number))
            else:
                if dtype not in self._on_host:
                    self._on_host[dtype] = fetch(flat[dtype][:self._layout.scalars[dtype]])
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
        try:
            self._communicator.wait()
        except ExchangeError as error:
            raise self._named(error) from error.__cause__

    def _named(self, error):
        """Return the error of an exchange; a ReplicaError for one of a lost device."""
        contexts = self._communicator.contexts
        if error.context is None:
            return error
        shard = self._shards.get(error.context)
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'exchange'
        return error_of(error, contexts.index(error.context), error.context, where, shard.span if shard else None,
                        contexts)


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

    def __init__(self, *of_host: Any, communicator: NcclCommunicator, over_ranks: bool) -> None:
        super().__init__(*of_host)
        self._communicator, self._over_ranks = communicator, over_ranks
        self._layout = Layout([])
        self._parts: Parts | None = None     # until they are added
        self._reduced: Reduced | None = None  # of the step that is under way

    @property
    def is_ready(self) -> bool:
        """Return whether the next sums can be added by NCCL, as far as this process knows."""
        return not self._communicator.has_failed

    def use_host(self) -> None:
        """Have the sums that `add_over` is to add go through the host, because a rank cannot use NCCL any more."""
        parts, self._parts = self._parts, None
        if parts is not None:
            super()._add(*parts, False, True)

    def taken(self) -> Values:
        if self._reduced is None:
            return super().taken()
        return {variable: DeviceSum(i, self._reduced) for i, variable in enumerate(self._placeholders)}

    def finish(self) -> None:
        """Wait until the devices have added the sums; raise the error as `Reduced.wait` does."""
        reduced, self._reduced = self._reduced, None
        if reduced is not None:
            reduced.wait()

    def add_over(self, ranks: Communicator) -> None:
        if self._parts is None:
            super().add_over(ranks)
        else:
            self._reduce(ranks)

    def clear(self) -> None:
        if self._parts is None:
            super().clear()
        else:
            self._parts = self._parts._replace(arrays=[list(map(_zeros_like, part)) for part in self._parts.arrays])

    def _add(self, parts, shards, contexts, accumulate, is_last):
        self._reduced = None
        self._parts = Parts(parts, shards, contexts)
        if not self._over_ranks:
            if self.is_ready:
                self._reduce(None)
            else:
                self.use_host()

    def _reduce(self, ranks):
        """Add the parts, by NCCL if that works."""
        parts, self._parts = self._parts, None
        with self._timings.span('all_reduce'):
            arrays = self._of_replicas(parts)
            flats = [self._layout.empty(context) for context in self._communicator.contexts]
            reduced = Reduced(self._layout, flats, self._communicator, parts)
            if self._communicator.is_verified:
                self._enqueue(arrays, flats, ranks)
                error = ''
            else:
                error = self._verified(arrays, flats, ranks)
        if not error:
            self._reduced = reduced
            return
        warn('NCCL does not work here: %s. From now on, sums go through the host, which takes longer; the flag '
             'mgpu.collectives=host does so without a warning' % error)
        super()._add(*parts, False, True)
        if ranks is not None:
            super().add_over(ranks)

    def _of_replicas(self, parts):
        """Return the parts of every context of this process, in order: zeros where a context has no samples."""
        of_context = {context: [_contiguous(context, array) for array in arrays]
                      for context, arrays in zip(parts.contexts, parts.arrays)}
        first = next(iter(of_context.values()))
        like = describe(first)
        if self._layout.like != like:
            self._layout = Layout(like)
        for context, arrays in of_context.items():
            if describe(arrays) != like:
                raise GraphError('the replicas have gradients, or other sums, of different shapes: %s on %s, %s on %s'
                                 % (like, parts.contexts[0].name, describe(arrays), context.name))
        return [of_context[context] if context in of_context else
                [_zeros_like(array, context) for array in first] for context in self._communicator.contexts]

    def _enqueue(self, arrays, flats, ranks):
        with span('all_reduce', 'all_reduce'):
            self._communicator.exchange(*self._layout.exchange(arrays, flats))

    def _verified(self, arrays, flats, ranks):
        """Add by NCCL and on the host, and compare; return how they differ, or the error, or an empty text."""
        lost = None
        try:
            self._enqueue(arrays, flats, ranks)
            self._communicator.wait()
            error = ''
        except ExchangeError as failed:
            error, lost = str(failed), failed.context
        if lost is not None and ranks is None:  # a failure of the device, not of NCCL
            return error
        errors = [error] if ranks is None else all_gather_object(ranks, error)
        if not any(errors):
            differs = [self._difference(arrays, flats, i, ranks) for i in range(len(self._layout.like))]
            error = next(filter(None, differs), '')
            errors = [error] if ranks is None else all_gather_object(ranks, error)
        error = next(filter(None, errors), '')
        if error:
            self._communicator.give_up()
        self._communicator.is_verified = not error
        return error

    def _difference(self, arrays, flats, i, ranks):
        """Return how the sum number i differs from the sum on the host, beyond rounding; an empty text if it does not.
        """
        parts = [fetch(part[i]).astype('float64').ravel() for part in arrays]
        total, scale = sum(parts), sum(map(abs, parts))
        if ranks is not None:
            ranks.handshake((ADD,))
            ranks.all_reduce([total, scale])
        first, *others = [fetch(self._layout.view(flat, i)).ravel() for flat in flats]
        if any(other.tobytes() != first.tobytes() for other in others):
            return 'the devices have different sums'
        limits = np.finfo(first.dtype)
        counts = np.isfinite(total) & (scale < limits.max / 4)
        error = abs(first[counts] - total[counts])
        n = len(arrays) * (ranks.size if ranks is not None else 1)
        if not (error <= n * (limits.eps * scale[counts] + limits.tiny)).all():
            return 'a sum differs from the sum on the host by %.3g, which is more than rounding' % np.nanmax(error)
        return ''


def _contiguous(context, array):
    """Return an array as one piece of memory on a context's device."""
    if isinstance(array, np.ndarray):
        from pygpu import gpuarray
        return gpuarray.array(array, context=gpu_context(context))
    return array if array.flags.c_contiguous else array.copy(order='C')


def _zeros_like(array, context=None):
    from pygpu import gpuarray
    return gpuarray.zeros(array.shape, array.dtype, context=gpu_context(context) if context else array.context)
