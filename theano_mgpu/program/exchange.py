"""What replicas have, put together: over those of this process, then over the ranks."""
import functools
from collections import namedtuple

import numpy as np

from ..distributed.collectives import all_gather_int, all_gather_object, all_gather_rows, all_reduce_small
from ..distributed.half_precision import all_reduce_in_half
from ..profiling.timeline import span
from ..replicas.collectives import all_reduce, bucket_ranges
from ..replicas.transfers import Fetcher, FlatBuffers, concatenated, describe
from ..utils.worker_threads import Task, WorkerThreads
from .accumulate import Accumulator
from .partition import SAME

REDUCE = {'sum': np.add, 'max': np.maximum, 'min': np.minimum, 'prod': np.multiply}


class Sums:
    """Sums over all samples that the replicas have parts of, such as gradients, in memory that every step uses again.

    Parameters
    ----------
    exchanges : list of Exchange
        Their sources are outputs of one stage, all of a floating dtype.
    read_on : dict of Context to (set of theano.Variable)
        What is read on each context: of the sums, these are sent there.
    each : callable
        ``each(name, tasks, shards, contexts)`` runs a task a shard.
    timings : Timings
    on_devices : bool
        Whether shards have their parts elsewhere than on the host.
    kept : collection of theano.Variable
        Those of the sources that a shard needs itself, too.
    one_replica : bool
        Whether one replica has all samples: the sums of its micro-batches stay on its device.
    over_ranks : {'all', 'half'} or list of int
        How ranks add: each gets all sums ('all'), and they send each other float16 ('half', see
        `half_precision.all_reduce_in_half`); or each sum goes to one rank, the only one that reads it.

    Attributes
    ----------
    views : list of ndarray
        Each sum; valid until the next step. Over the ranks, None for one that goes to another rank.
    """

    def __init__(self, exchanges, read_on, each, timings, on_devices, kept=(), one_replica=False,
                 over_ranks='all'):
        self.sources = [exchange.source for exchange in exchanges]
        self._places = [exchange.variable for exchange in exchanges]
        self._kept, self._one_replica, self._in_half = set(kept), one_replica, over_ranks == 'half'
        self._owners = None if over_ranks in ('all', 'half') else over_ranks
        self._each, self._timings, self._on_devices = each, timings, on_devices
        self._buffers = self.views = None
        self._wanted = {context: [i for i, place in enumerate(self._places) if place in read]
                        for context, read in read_on.items()}
        self._fetchers = {}
        self._accumulator, self._held = Accumulator(self.sources), {}
        self._on_its_device = None  # the sums of the only replica
        self._underway = []

    def add(self, shards, contexts, number=0, n_rounds=1):
        """Add what shards have; large arrays are added on another thread while the next ones come from the devices.

        Parameters
        ----------
        shards : list of Shard
            They let go of their parts.
        contexts : list of Context
            Where each of them has its part.
        number, n_rounds : int
            Which round of a step it is, and how many there are. On devices, the parts of all rounds are added there.
        """
        parts = [[shard.known[source] if source in self._kept else shard.known.pop(source) for source in self.sources]
                 for shard in shards]
        accumulate = number > 0
        if n_rounds > 1 and contexts[0].kind != 'cpu':
            self._hold(parts, shards, contexts, accumulate)
            if number < n_rounds - 1:
                return
            shards, contexts, parts = zip(*self._held.values())
            self._held, accumulate = {}, False
            if self._one_replica:
                self._on_its_device = parts[0]
                return
        if self._owners and len(parts) == 1 and number == n_rounds - 1 and not accumulate:
            # Ranks send them from where they are.
            self.views, = self._fetched(parts, (0, len(self.sources)), shards, contexts)
        else:
            self._add(parts, shards, contexts, accumulate)

    def taken(self):
        """What stands for the sums, to them, for one step: what is on a device is freed with them."""
        values, self._on_its_device = self._on_its_device, None
        if values is None:
            sent = {}
            values = [Sum(self, i, sent) for i in range(len(self._places))]
        return dict(zip(self._places, values))

    def _hold(self, parts, shards, contexts, accumulate):
        """Keep the sums over the rounds, one for each replica."""
        if not accumulate:
            self._held = {}
        else:
            self._accumulator.prepare(contexts)
            tasks = [functools.partial(self._accumulator.add, context, self._held[shard.replica][-1], part)
                     for shard, context, part in zip(shards, contexts, parts)]
            with self._timings.span('launch'):
                parts = self._each('launch', tasks, shards, contexts)
        self._held.update((shard.replica, (shard, context, part))
                          for shard, context, part in zip(shards, contexts, parts))

    def _add(self, parts, shards, contexts, accumulate):
        if self._underway:  # an interrupted step may have left some, which add to the same memory
            self._thread.finish(self._underway)
            self._underway = []
        like = describe(parts[0])
        if self._buffers is None or self._buffers.like != like:
            self._buffers = FlatBuffers(like)
        self.views = self._buffers.views
        sizes = [array.size * array.itemsize for array in self.views]
        buckets = list(bucket_ranges(sizes)) if self._on_devices else [(0, len(sizes))]
        for bucket in buckets[:-1]:
            self._underway.append(Task(self._fetched(parts, bucket, shards, contexts), self.views[slice(*bucket)],
                                       accumulate))
            self._thread.submit(self._underway[-1])
        arrays, targets = self._fetched(parts, buckets[-1], shards, contexts), self.views[slice(*buckets[-1])]
        flat = [self._fetcher(context, buckets[-1]).flat for context in contexts]
        if len(buckets) == 1 and all(flat):  # many small ones are added as one
            arrays, targets = flat, self._buffers.flat
        with self._timings.span('all_reduce'):
            _add_up(arrays, targets, accumulate)
            for task in self._underway:
                task.result()

    @functools.cached_property
    def _thread(self):
        return WorkerThreads([_add_up], 'theano_mgpu all_reduce')

    def _fetched(self, parts, bucket, shards, contexts):
        """A bucket of the parts of each replica, on the host."""
        arrays = [part[slice(*bucket)] for part in parts]
        if not self._on_devices:
            return arrays
        with self._timings.span('device_to_host'):
            tasks = [functools.partial(self._fetcher(context, bucket).fetch, part)
                     for context, part in zip(contexts, arrays)]
            return self._each('device_to_host', tasks, shards, contexts)

    def _fetcher(self, context, bucket):
        key = context, bucket
        if key not in self._fetchers:
            self._fetchers[key] = Fetcher(context)
        return self._fetchers[key]

    def add_over(self, ranks):
        """Add the sums over the ranks, which have just had a handshake."""
        if self._owners:
            self.views = ranks.reduce_scatter(self.views, self._owners)
        elif self._in_half:
            all_reduce_in_half(ranks, self.views)
        else:
            ranks.all_reduce(self._buffers.flat)

    def clear(self):
        """Make every sum 0."""
        if self._owners:
            self.views = [np.zeros(view.shape, view.dtype) for view in self.views]
        else:
            for flat in self._buffers.flat:
                flat[...] = 0

    def send(self, context):
        """The sums that are read on a context, by their number, on its device; sent in one copy a dtype."""
        wanted, here = self._wanted[context], self._buffers
        if self._owners or len(wanted) < len(self.views):
            here = FlatBuffers(describe([self.views[i] for i in wanted]))
            for i, view in zip(wanted, here.views):
                view[...] = self.views[i]
        there = FlatBuffers(here.like, context)
        for to, flat in zip(there.flat, here.flat):
            to.write(flat)
        return dict(zip(wanted, there.views))


def _add_up(arrays, targets, accumulate):
    """Add each replica's arrays to `targets`, or put their sums there."""
    with span('all_reduce', 'all_reduce'):
        for each, out in zip(zip(*arrays), targets):
            all_reduce(each, out, accumulate)


class Sum(namedtuple('Sum', 'sums index sent')):
    """One sum of Sums, in one step; `sent` has what is on each device, the same for all sums of the step."""

    @property
    def on_host(self):
        return self.sums.views[self.index]

    def on(self, context):
        """The sum where functions of a context take it."""
        if context.kind == 'cpu':
            return self.on_host
        if context not in self.sent:
            self.sent[context] = self.sums.send(context)
        return self.sent[context][self.index]


def plan_exchanges(compiled, ranks, each, timings, on_devices):
    """What is to be exchanged in a step of a CompiledProgram; the other parameters are those of `Sums`.

    Returns
    -------
    sums : dict of ParallelGraph to list of Sums
        What is added up after each part of a stage.
    boundaries : list of (list of Sums, list of Exchange, list of Exchange)
        Before each stage, and at the end: sums, what else is exchanged, and both.
    """
    sums, boundaries = {}, []
    read_on, every_part = compiled.read_on(), [part for _, parts in compiled.stages for part in parts]
    one_replica = ranks.size == len(compiled.mesh.replicas) == 1
    for exchanges in [stage.exchanges for stage, _ in compiled.stages] + [compiled.program.exchanges]:
        additive = [exchange for exchange in exchanges
                    if exchange.how == 'sum' and exchange.source.dtype.startswith('float')]
        here = []
        for part in every_part:
            ways = {'all': [], 'half': [], 'owner': []}
            for exchange in additive:
                if exchange.source in part.outputs:
                    ways[compiled.over_ranks(exchange.variable)].append(exchange)
            for way, some in ways.items():
                if some:
                    over = [compiled.owners[exchange.variable] for exchange in some] if way == 'owner' else way
                    here.append(Sums(some, read_on, each, timings, on_devices, compiled.kept, one_replica, over))
                    sums.setdefault(part.graph, []).append(here[-1])
        boundaries.append((here, [exchange for exchange in exchanges if exchange not in additive], exchanges))
    return sums, boundaries


def exchanged(parts, hows, lengths, ranks):
    """The whole of each value, the same on every rank.

    Parameters
    ----------
    parts : list of list of ndarray
        For each value, what the replicas of this process have, in the order of their samples.
    hows : list of (str or (str, int))
        'sum', 'max', 'min', 'prod', or ``('gather', axis)``; 'stack' for all parts, along a new axis 0; 'same' for
        what each has alike.
    lengths : list of int
        Samples of each rank. What one without samples has does not count.
    ranks : Communicator

    Returns
    -------
    list of ndarray
    """
    values = [_of_process(each, how) for each, how in zip(parts, hows)]
    if ranks.size == 1:
        return values
    sums = [i for i, how in enumerate(hows) if how == 'sum']
    counts = lengths[ranks.rank] > 0
    totals = all_reduce_small(ranks, [values[i] if counts else np.zeros_like(values[i]) for i in sums])
    for i, total in zip(sums, totals):
        values[i] = total
    for i, how in enumerate(hows):
        if how != 'sum':
            values[i] = _of_ranks(values[i], how, lengths, ranks)
    return values


def _of_process(parts, how):
    if how == 'stack':
        return np.stack(parts)
    if isinstance(how, tuple):
        return parts[0] if len(parts) == 1 else concatenated(parts, how[1])
    return parts[0] if len(parts) == 1 or how == SAME else np.asarray(REDUCE[how].reduce(parts), parts[0].dtype)


def _of_ranks(value, how, lengths, ranks):
    counts = [int(length > 0) for length in lengths]
    if how == SAME:
        return value
    if how == 'stack':
        return all_gather_rows(ranks, value, [count * n for count, n in zip(counts, all_gather_int(ranks, len(value)))])
    if isinstance(how, tuple) and not isinstance(value, np.ndarray):
        found = all_gather_object(ranks, value if lengths[ranks.rank] else None)
        return concatenated([part for part in found if part is not None], how[1])
    if isinstance(how, tuple):
        rows = np.ascontiguousarray(np.moveaxis(value, how[1], 0))
        each = rows.shape[0] // max(1, lengths[ranks.rank])  # a sample may own several rows
        return np.moveaxis(all_gather_rows(ranks, rows, [each * length for length in lengths]), 0, how[1])
    every = all_gather_rows(ranks, np.ascontiguousarray(value[np.newaxis]), counts)
    return np.asarray(REDUCE[how].reduce(every), value.dtype)
