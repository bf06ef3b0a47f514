"""Sums over all samples, such as gradients, which are added on the host: over the replicas, then over the ranks."""
from __future__ import annotations

import functools
import threading
import time
from typing import Any, Collection, Mapping, NamedTuple, Sequence

import numpy as np
import theano

from ..comm.activities import ADD
from ..comm.communicator import Communicator
from ..comm.half_precision import all_reduce_in_half
from ..comm.host_sum import all_reduce, bucket_ranges
from ..comm.tree import Node, Tree, add_arrays, add_over_ranks
from ..comm.tree_products import Product, add_products
from ..devices.context_map import HOST, Context
from ..plan import AllReduce, ReduceScatter, SumGroup
from ..utils.worker_threads import Task, WorkerThreads
from .batch import Shard, Split, Sum
from .compiler import compile_for
from .launcher import Launcher
from .replicas.transfers import Fetcher, FlatBuffers, Sender, describe, flat_layout, on_device
from .timeline import HOST as HOST_TRACK
from .timeline import Timings, note, span


class HostSums:
    """The sums of a SumGroup, in memory on the host that every step uses again.

    Parameters
    ----------
    group : SumGroup
    read_on : dict of Context to (set of theano.Variable)
        The placeholders that are read on each context: their sums are sent there.
    launcher : Launcher
    timings : Timings
    one_replica : bool
        Whether one replica has all samples: the sums of its micro-batches stay on its device.

    Attributes
    ----------
    views : list of ndarray
        Each sum; valid until the next step. None for one that another rank owns.
    by_host : bool
        Whether it is the host that adds the sums.
    """

    by_host = True

    def __init__(self, group: SumGroup, read_on: Mapping[Context, Collection[theano.Variable]], launcher: Launcher,
                 timings: Timings, one_replica: bool):
        self._collective: Any = group.collective
        self._launcher, self._timings = launcher, timings
        self._sources = [exchange.source for exchange in group.exchanges]
        self._one_replica = one_replica
        self._on_devices = any(context.kind != 'cpu' for context in read_on)
        self._wanted = {context: [i for i, each in enumerate(group.exchanges) if each.variable in read]
                        for context, read in read_on.items()}
        self.views: list[Any] = []
        self._buffers = FlatBuffers([])
        self._fetchers: dict[Any, Fetcher] = {}
        self._adders: dict[Context, Any] = {}  # a compiled function and its Sender
        self._held: dict[int, Any] = {}
        self._on_its_device: Any = None  # the sums of the only replica
        self._underway: list[Task] = []

    def add(self, split: Split, number: int, contexts: Sequence[Context], parts: Sequence[list[Any]]) -> None:
        """Add the parts of shards; large arrays are added on another thread while the next ones come from the devices.

        Parameters
        ----------
        split : Split
            Of the batch.
        number : int
            The number of the round whose shards have computed their parts. On devices, the parts of all rounds are
            added there.
        contexts : list of Context
            The context that each of the shards has its part on.
        parts : list of list of (ndarray or pygpu.gpuarray.GpuArray)
            For each of the shards its part of each sum.
        """
        shards, n_rounds, accumulate = split.rounds[number], len(split.rounds), number > 0
        if n_rounds > 1 and contexts[0].kind != 'cpu':
            self._hold(parts, shards, contexts, accumulate)
            if number < n_rounds - 1:
                return
            shards, contexts, parts = zip(*self._held.values())
            self._held, accumulate = {}, False
            if self._one_replica:
                self._on_its_device = parts[0]
                return
        self._add(parts, shards, contexts, accumulate, number == n_rounds - 1)

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step: copies on devices are freed with them."""
        values, self._on_its_device = self._on_its_device, None
        if values is None:
            values = self.views
            if self._on_devices:
                sent: dict[Context, dict[int, Any]] = {}
                values = [Sum(view, i, self, sent) for i, view in enumerate(self.views)]
        return values

    def add_over(self, ranks: Communicator) -> None:
        """Add the sums over the ranks, which have just had a handshake."""
        if self._collective == AllReduce(half=True):
            all_reduce_in_half(ranks, self.views)
        else:
            ranks.all_reduce(self._buffers.flat)

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices."""
        self._held, self._on_its_device = {}, None

    def clear(self) -> None:
        """Make every sum 0."""
        for flat in self._buffers.flat:
            flat[...] = 0

    def send(self, context: Context) -> dict[int, Any]:
        """Return the sums that are read on a context, by number, on its device; they are sent in one copy a dtype."""
        wanted = self._wanted[context]
        here = self._together(wanted)
        there = FlatBuffers(here.like, on_device(context))
        for to, flat in zip(there.flat, here.flat):
            to.write(flat)
        return dict(zip(wanted, there.views))

    def _together(self, wanted):
        """Return some of the sums in one piece of memory."""
        return self._buffers if len(wanted) == len(self.views) else self._copied(wanted)

    def _copied(self, wanted):
        buffers = FlatBuffers(describe([self.views[i] for i in wanted]))
        for i, view in zip(wanted, buffers.views):
            view[...] = self.views[i]
        return buffers

    def _hold(self, parts, shards, contexts, accumulate):
        """Keep the sums over the rounds, one for each replica, on its device."""
        if not accumulate:
            self._held = {}
        else:
            tasks = [functools.partial(self._added, context, self._held[shard.replica][-1], part)
                     for shard, context, part in zip(shards, contexts, parts)]
            for context in contexts:
                self._compile_adder(context)
            parts = self._launcher.run('launch', tasks, contexts, shards)
        self._held.update((shard.replica, (shard, context, part))
                          for shard, context, part in zip(shards, contexts, parts))

    def _added(self, context, totals, values):
        """Return the totals with values added, in new arrays on a context's device."""
        function, sender = self._adders[context]
        given = [each if each.ndim else each.reshape((1,)) for each in [*totals, *values]]
        sums = function.mgpu_call(*sender.send(given))
        return [each if source.ndim else each.reshape(()) for source, each in zip(self._sources, sums)]

    def _compile_adder(self, context):
        if context not in self._adders:
            # Functions take scalars on the host, which would wait for the device.
            types = [source.type.clone(broadcastable=source.broadcastable or (True,)) for source in self._sources]
            totals, values = [[each() for each in types] for _ in range(2)]
            function = compile_for(context, totals + values, [total + value for total, value in zip(totals, values)],
                                   {}, {}, name='sums of micro-batches',
                                   like=[other for other, _ in self._adders.values()])
            self._adders[context] = function, Sender(function)

    def _add(self, parts, shards, contexts, accumulate, is_last):
        """Add the parts of the replicas to the sums, or make the sums of them."""
        if self._underway:  # an interrupted step may have left some, which add to the same memory
            self._thread.finish(self._underway)
            self._underway = []
        like = describe(parts[0])
        if self._buffers.like != like:
            self._buffers = FlatBuffers(like)
        self.views = self._buffers.views
        if not self._on_devices:
            began = time.perf_counter()
            _add_arrays(parts, self.views, accumulate)
            note(self._timings.seconds, 'all_reduce', HOST_TRACK, began)
            return
        buckets = list(bucket_ranges([each.nbytes for each in self.views]))
        for bucket in buckets[:-1]:
            self._underway.append(Task(self._fetched(parts, bucket, shards, contexts), self.views[slice(*bucket)],
                                       accumulate))
            self._thread.submit(self._underway[-1])
        arrays, targets = self._fetched(parts, buckets[-1], shards, contexts), self.views[slice(*buckets[-1])]
        if len(buckets) == 1:
            flat = [fetcher.flat for fetcher in self._fetchers_of(contexts, buckets[-1])]
            if all(flat):  # many small ones are added as one
                arrays, targets = flat, self._buffers.flat
        with self._timings.span('all_reduce'):
            _add_arrays(arrays, targets, accumulate)
            for task in self._underway:
                task.result()

    @functools.cached_property
    def _thread(self):
        return WorkerThreads([_add_up], 'theano_mgpu all_reduce')

    def _fetched(self, parts, bucket, shards, contexts):
        """Return a bucket of the parts of each replica, on the host."""
        arrays = [part[slice(*bucket)] for part in parts]
        if not self._on_devices:
            return arrays
        fetchers = self._fetchers_of(contexts, bucket)
        for tasks in ([functools.partial(fetcher.start, part) for fetcher, part in zip(fetchers, arrays)],
                      [fetcher.finish for fetcher in fetchers]):
            fetched = self._launcher.run('device_to_host', tasks, contexts, shards)
        return fetched

    def _fetchers_of(self, contexts, bucket):
        # Several replicas may have their parts on the host.
        return [self._fetchers.setdefault((i, context, bucket), Fetcher(context)) for i, context in enumerate(contexts)]


class OwnedSums(HostSums):
    """Sums over the ranks, each of which goes to one rank alone: each is a message of its own, from where it lies."""

    def _add(self, parts, shards, contexts, accumulate, is_last):
        if len(parts) == 1 and is_last and not accumulate:
            self.views, = self._fetched(parts, (0, len(self._sources)), shards, contexts)
        else:
            super()._add(parts, shards, contexts, accumulate, is_last)

    def add_over(self, ranks: Communicator) -> None:
        self.views = ranks.reduce_scatter(self.views, self._collective.owners)

    def clear(self) -> None:
        self.views = [np.zeros(view.shape, view.dtype) for view in self.views]

    def _together(self, wanted):
        return self._copied(wanted)


class TreeSums(HostSums):
    """Sums of logical shards, added in the order of a tree: on the device of each replica first, then on the host.

    An addition has the same bits on the host and on devices, as IEEE 754 has it. Large products of shards on the host
    are computed and added last, see `add_products`.
    """

    def __init__(self, group: SumGroup, *others: Any):
        super().__init__(group, *others)
        self._owners = group.collective.owners if isinstance(group.collective, ReduceScatter) else ()
        self._tree = Tree(0, (1,))
        self._nodes: dict[int, list[Node]] = {}  # of each replica
        self._places: dict[int, tuple[Shard, Context]] = {}  # a shard of each replica, and the context of its parts
        self._here: list[Node] = []  # of all replicas, on the host
        self._products: dict[int, dict[int, Product]] = {}  # of each source, by the number of the shard
        self._levels: dict[Any, FlatBuffers] = {}  # memory for the nodes of each level, by replica

    def add(self, split: Split, number: int, contexts: Sequence[Context], parts: Sequence[list[Any]]) -> None:
        shards = split.rounds[number]
        assert split.tree is not None
        if number == 0:
            self._tree, self._nodes, self._places, self._here, self._products = split.tree, {}, {}, [], {}
        tasks = []
        for shard, context, part in zip(shards, contexts, parts):
            if context.kind != 'cpu':
                self._compile_adder(context)
            self._use_buffers(describe(part))
            for i, value in enumerate(part):
                if isinstance(value, Product):
                    part[i] = self._kept_apart(i, shard.number, value)
            self._places[shard.replica] = shard, context
            tasks.append(functools.partial(self._merge, shard, context, Terms(part)))
        if not split.idle:
            self._launcher.run('launch' if self._on_devices else 'all_reduce', tasks, contexts, shards)
        if number == len(split.rounds) - 1:
            self._add_replicas()

    def add_over(self, ranks: Communicator) -> None:
        for i, flat in enumerate(self._buffers.flat):
            nodes = [node._replace(value=node.value.flat[i]) for node in self._here]
            blocks = self._blocks(flat, ranks.size)
            own = add_over_ranks(ranks, self._tree, nodes, blocks, flat.dtype)
            if self._owners:
                flat[slice(*blocks[ranks.rank])] = own
            else:
                ranks.all_gather(own, flat, [stop - start for start, stop in blocks])
        if self._owners:
            self.views = [view if owner == ranks.rank else None
                          for view, owner in zip(self._buffers.views, self._owners)]

    def drop(self) -> None:
        super().drop()
        self._nodes, self._places, self._here, self._products = {}, {}, [], {}

    def _use_buffers(self, like):
        if self._buffers.like != like:
            self._buffers, self._levels = FlatBuffers(like), {}
        self.views = self._buffers.views

    def _kept_apart(self, i, number, product):
        """Return a product of a shard if it is small; keep a large one for later, and return None."""
        if product.is_small:
            return product.computed()
        self._products.setdefault(i, {})[number] = product
        return None

    def _merge(self, shard, context, part):
        nodes = self._nodes.setdefault(shard.replica, [])
        self._tree.merge(nodes, Node(0, shard.number, part), functools.partial(self._sum, context, shard.replica))

    def _sum(self, context, replica, every_terms, level, place):
        """Return the sum of some nodes, where they are."""
        if context.kind != 'cpu':
            total = every_terms[-1].views
            for terms in every_terms[-2::-1]:
                total = self._added(context, terms.views, total)
            return Terms(total)
        out = self._memory_for(replica, level, place)
        for i, view in enumerate(out.views):
            if i not in self._products:
                add_arrays([terms.views[i] for terms in every_terms], view)
        return out

    def _memory_for(self, replica, level, place):
        """Return memory on the host for a node. Two of a level may wait at a time, the left one at an odd place."""
        if 1 << level >= self._tree.total:
            return self._buffers
        key = replica, level, place % 2
        if key not in self._levels:
            self._levels[key] = FlatBuffers(self._buffers.like)
        return self._levels[key]

    def _add_replicas(self):
        """Add the nodes of all replicas; a process without samples has none."""
        of_replicas = sorted(self._nodes.items())
        nodes = [node for _, own in of_replicas for node in own]
        places = [self._places[replica] for replica, own in of_replicas for _ in own]
        self._nodes, self._places = {}, {}
        shards, contexts = zip(*places) if places else ((), ())
        self._add(nodes, shards, contexts, False, True)

    def _add(self, parts, shards, contexts, accumulate, is_last):
        """Add nodes on the host. What only one replica has stays on its device."""
        if self._one_replica and self._on_devices:
            self._on_its_device = parts[0].value.views
            return
        fetched = self._fetched([node.value.views for node in parts], (0, len(self._sources)), shards, contexts) \
            if parts else []
        here = [node if isinstance(node.value, FlatBuffers) else node._replace(value=Terms(arrays))
                for node, arrays in zip(parts, fetched)]
        with self._timings.span('all_reduce'):
            here = self._tree.merged(here, functools.partial(self._sum, HOST, None))
            self._here = [node if isinstance(node.value, FlatBuffers) else self._copied_to_host(i, node)
                          for i, node in enumerate(here)]
            for i, products in self._products.items():
                add_products(self._tree, sorted(products.items()), [node.value.views[i] for node in self._here])
            self._products = {}

    def _copied_to_host(self, i, node):
        """Return a node with its arrays in one piece of memory for each dtype."""
        memory = self._memory_for(('copy', i), node.level, node.place)
        for array, view in zip(node.value.views, memory.views):
            if array is not None:
                view[...] = array
        return node._replace(value=memory)

    def _blocks(self, flat, n_ranks):
        """Return the elements of a flat array that each rank adds."""
        if not self._owners:
            bounds = [flat.size * rank // n_ranks for rank in range(n_ranks + 1)]
            return list(zip(bounds, bounds[1:]))
        _, places = flat_layout(self._buffers.like)
        blocks, end = [], 0
        for rank in range(n_ranks):
            own = [place for place, owner, (_, dtype) in zip(places, self._owners, self._buffers.like)
                   if owner == rank and dtype == flat.dtype]
            blocks.append((own[0].start, own[-1].stop) if own else (end, end))
            end = blocks[-1][1]
        return blocks


class Terms(NamedTuple):
    """The arrays of a node of the tree, on one device."""

    views: Sequence[Any]


SUMS = {AllReduce: HostSums, ReduceScatter: OwnedSums}  # by the class of the collective


def _add_up(arrays, targets, accumulate):
    """Add arrays as `_add_arrays`, on a thread of its own."""
    with span('all_reduce', 'all_reduce'):
        _add_arrays(arrays, targets, accumulate)


def _add_arrays(arrays, targets, accumulate):
    """Add each replica's arrays to `targets`, or put their sums there."""
    for each, out in zip(zip(*arrays), targets):
        all_reduce(each, out, accumulate)


class OverRanks:
    """The addition of sums over the ranks, in place: in order, or each while the next part of a stage is computed.

    The sums of an idle rank, which has no samples, are 0.

    Parameters
    ----------
    ranks : Communicator
    timings : Timings
    overlaps : bool
        Whether `start` adds on a thread of its own. The ranks exchange a handshake before, in the thread that calls.
        So an error of one rank is found as in a step without overlap.

    Attributes
    ----------
    underway : dict of HostSums to Task
        Sums of a later boundary may be among them.
    """

    def __init__(self, ranks: Communicator, timings: Timings, overlaps: bool):
        self._ranks, self._timings = ranks, timings
        self._overlaps = overlaps and ranks.size > 1
        self._threads = WorkerThreads([_add_over] * self._overlaps, 'theano_mgpu exchange')
        self.underway: dict[HostSums, Task] = {}

    def wait(self) -> None:
        """Wait for the sums under way; also after an error, since the other ranks add, too."""
        self._threads.finish(self.underway.values())
        self.underway = {}

    def start(self, sums: HostSums, idle: bool) -> None:
        """Begin to add, if there is a thread for it; devices need none."""
        if not self._overlaps or not sums.by_host:
            return
        self._meet([sums], idle)
        begun, busy = threading.Lock(), any(not each.done() for each in self.underway.values())
        begun.acquire()
        self.underway[sums] = task = Task(sums, self._ranks, begun)
        self._threads.submit(task)
        if not busy:
            begun.acquire()  # Theano's compiled code keeps Python's lock: without this, the thread would start after it

    def finish(self, every_sums: Sequence[HostSums], idle: bool) -> None:
        """Add the rest of these sums, and end those under way: ranks have to exchange values in one order."""
        if self._ranks.size == 1:
            return
        with self._timings.span('exchange'):
            for each in self.underway.values():
                each.result()
        rest = [sums for sums in every_sums if sums not in self.underway]
        if rest:
            self._meet(rest, idle)
            with self._timings.span('exchange'):
                for sums in rest:
                    sums.add_over(self._ranks)

    def _meet(self, every_sums, idle):
        for sums in every_sums if idle else ():
            sums.clear()
        with self._timings.span('wait'):
            on_devices = [sums for sums in every_sums if not sums.by_host]
            if not on_devices:
                self._ranks.handshake((ADD,))
            elif not self._ranks.handshake((ADD,), [all(sums.is_ready for sums in on_devices)]).all():
                for sums in on_devices:
                    sums.use_host()


def _add_over(sums, ranks, begun):
    begun.release()
    with span('exchange', 'exchange'):
        sums.add_over(ranks)
