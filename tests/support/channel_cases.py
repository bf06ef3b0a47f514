"""The duties of any channel of sums, with each order of additions: cases ``case(make, contexts)``.

A new channel is one file in theano_mgpu/exchange, a function here that makes it, and one line in `CHANNELS`.
A case knows the parts of all replicas, and so the sums. In any order, the parts are small whole numbers, which no
addition rounds. In the order of the tree, they are any numbers, and a sum has the bits of NumPy's additions.
"""
import contextlib
import ctypes
import functools
import gc
import sys
import traceback
import warnings
from typing import NamedTuple

from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.comm.tree import Tree
from theano_mgpu.devices import copies
from theano_mgpu.devices.context_map import HOST
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.devices.launcher import Launcher, Shard
from theano_mgpu.devices.nccl import communicator_of, connect
from theano_mgpu.devices.transfers import copy_to, fetch
from theano_mgpu.errors import MgpuWarning
from theano_mgpu.exchange import host, layout, memory, nccl_channel, orders, tree_devices
from theano_mgpu.exchange.layout import ALIGNED
from theano_mgpu.exchange.over_ranks import OverRanks
from theano_mgpu.runtime.batch import Split
from theano_mgpu.utils.executors import make_executor
from theano_mgpu.utils.timeline import Timings

import numpy as np
import theano

from .device_memory import peaks
from .interrupts import interrupting_at

LARGE = 9000      # elements that take more than `layout.SMALL` bytes
HUGE = 1 << 20    # elements of a block
CASES = {}


# ----------------------------------------------------------------------------------------------------------- channels


class Make:
    """A maker of channels of one kind over contexts: ``make(order, owners, read_on)`` returns one, and its order.

    Parameters
    ----------
    channel : callable
        One of `CHANNELS`.
    contexts : list of Context
        One for each replica.
    ranks : Communicator, optional
    dtypes : tuple of str
        The floats that the channel adds.
    """

    def __init__(self, channel, contexts, ranks=None, dtypes=('float32', 'float64')):
        self.channel, self.contexts, self.ranks, self.dtypes = channel, contexts, ranks or Communicator(), dtypes
        self.memories, self.timings = Measured(), Timings()
        self.launcher = Launcher(make_executor('serial', len(contexts)), self.timings)

    def __call__(self, order, owners=(), read_on=None):
        """Return a new channel and its order.

        Parameters
        ----------
        order : {'any', 'tree'}
        owners : list of (int or None)
            For each sum the replica that alone reads it; None if others do.
        read_on : dict of Context to (list of int)
            The numbers of the sums that are read on each context.
        """
        added = (orders.TreeOrder if order == 'tree' else orders.AnyOrder)(self.memories, self.launcher)
        return self.channel(self, added, owners, {HOST: [], **read_on}), added


def stays(make, order, owners, read_on):
    """Return no channel: the sums of a replica alone."""
    return host.Stays()


def by_host(make, order, owners, read_on):
    """Return a HostChannel; where ranks divide the sums, the owner is the rank of the replica."""
    of_ranks = [owner // len(make.contexts) for owner in owners if owner is not None]
    is_divided = make.ranks.size > 1 and len(of_ranks) == len(owners)
    return host.HostChannel(order, of_ranks if is_divided else (), read_on, make.memories, make.launcher, make.timings,
                            make.ranks)


def by_nccl(make, order, owners, read_on):
    """Return an NcclChannel."""
    assert connect(make.contexts, make.ranks) == ''
    communicator = communicator_of(make.contexts, make.ranks.size)
    assert not communicator.has_failed
    adder = tree_devices.InTree(order, make.memories, make.launcher) if isinstance(order, orders.TreeOrder) else \
        nccl_channel.NcclSum()
    return nccl_channel.NcclChannel(communicator, owners, adder, make.memories, make.timings, make.ranks)


CHANNELS = {'stays': stays, 'host': by_host, 'nccl': by_nccl}


class Measured(memory.Memories):
    """Memories that count the bytes of new arrays on each device, by context."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __missing__(self, context):
        made = super().__missing__(context)
        if context.kind != 'cpu':
            empty = made.empty

            def counted(shape, dtype):
                size = int(np.prod(shape, dtype='int64')) * np.dtype(dtype).itemsize
                self.bytes[context] = self.bytes.get(context, 0) + size
                return empty(shape, dtype)
            made.empty = counted
        return made


# -------------------------------------------------------------------------------------------------------------- steps


class Sent(NamedTuple):
    """An array, and its layout in memory: 'C', 'F', 'strided' or 'backwards'."""

    array: np.ndarray
    layout: str = 'C'

    def on(self, context):
        """Return the array on a context, as a part that a function has left there."""
        shape, layout, part = self.array.shape, self.layout if self.array.ndim else 'C', ...
        if layout == 'strided':
            shape, part = tuple(2 * n + 1 for n in shape), tuple(slice(1, None, 2) for n in shape)
        elif layout == 'backwards':
            part = slice(None, None, -1)
        memory_order = 'F' if layout == 'F' else 'C'
        if context.kind == 'cpu':
            whole = np.zeros(shape, self.array.dtype, memory_order)
            whole[part] = self.array
            return whole if part is ... else whole[part]
        from pygpu import gpuarray  # not installed on every machine without a GPU
        whole = np.zeros(shape, self.array.dtype, memory_order)
        whole[part] = self.array
        there = gpuarray.array(whole, dtype=whole.dtype, order=memory_order, context=gpu_context(context))
        return there if part is ... else there[part]



class Steps:
    """The steps of a new channel, each as StepRun does it.

    Parameters
    ----------
    order : {'any', 'tree'}
    make : Make
    n : int
        The number of sums.
    owners, read_on
        As for `Make`; without `read_on` each context reads all.
    """

    def __init__(self, order, make, n, owners=(), read_on=None):
        self.in_tree, self.contexts, self.ranks, self.n, self.make = order == 'tree', make.contexts, make.ranks, n, make
        self.read_on = read_on or {context: list(range(n)) for context in make.contexts}
        self.channel, self.order = make(order, owners, self.read_on)
        first = self.ranks.rank * len(self.contexts)
        self.own = [i for i, owner in enumerate(owners or [None] * n)
                    if owner is None or first <= owner < first + len(self.contexts)]
        self.over_ranks = OverRanks(self.ranks, make.timings, False)

    def parts(self, seed, like, counts, layouts=('C',)):
        """Return parts: for each replica of all ranks a list of shards, each a list with a Sent for each sum.

        Parameters
        ----------
        seed : int
        like : list of (shape, dtype)
        counts : list of int
            The number of shards of each replica of all ranks.
        layouts : sequence of str
            They are taken in turn.
        """
        rng = np.random.RandomState(seed)

        def drawn(shape, dtype):
            some = min(500, int(np.prod(shape)))
            values = rng.randn(some) * 3 if self.in_tree else rng.randint(-8, 9, some)
            return np.resize(np.asarray(values, dtype), shape)
        assert len(counts) == len(self.contexts) * self.ranks.size and len(like) == self.n
        return [[[Sent(drawn(*each), layouts[i % len(layouts)]) for i, each in enumerate(like)] for _ in range(count)]
                for count in counts]

    def split(self, parts):
        """Return the Split of a batch whose shards have these parts."""
        counts, n, rank = list(map(len, parts)), len(self.contexts), self.ranks.rank
        of_ranks = [sum(counts[first:first + n]) for first in range(0, len(counts), n)]
        own, first = counts[rank * n:(rank + 1) * n], sum(of_ranks[:rank])
        starts = np.cumsum([0, *own]).tolist()
        rounds = [[Shard(i, (starts[i] + k, starts[i] + k + 1), first + starts[i] + k) for i, count in enumerate(own)
                   if count > k] for k in range(max(own))]
        tree = Tree(rank, tuple(of_ranks), tuple(counts)) if self.in_tree else None
        rounds = rounds or [[Shard(0, (0, 1), first)]]
        return Split(sum(rounds, []), rounds, sum(counts), of_ranks, not of_ranks[rank], None, tree, None, [], [])

    def add(self, parts, rounds=None):
        """Add the parts of the first rounds, or all, where they are; return what the order returns at last."""
        split, first, added = self.split(parts), self.ranks.rank * len(self.contexts), None
        for number, shards in enumerate(split.rounds[:rounds]):
            assert added is None
            contexts = [self.contexts[shard.replica] for shard in shards]
            if split.idle:  # a sample that does not count
                own = [next(each[0] for each in parts if each)]
            else:
                own = [parts[first + shard.replica][number] for shard in shards]
            added = self.order.add(split, number, contexts, [[each.on(context) for each in part]
                                                             for part, context in zip(own, contexts)])
        return added

    def prepare(self, parts):
        """Add all parts, and have the channel take them."""
        self.channel.prepare(self.add(parts))

    def taken(self):
        """Return the sums."""
        self.over_ranks.finish([self.channel])
        return list(self.channel.taken())

    def sums(self, parts):
        """Return the sums of a new step."""
        self.prepare(parts)
        return self.taken()

    def finish(self):
        """End the step; the host waits for devices alone."""
        if not self.channel.by_host:
            self.channel.finish()

    def drop(self):
        """End the step as after an error."""
        self.order.drop()
        self.channel.drop()

    def expected(self, parts):
        """Return the sums of parts."""
        shards = [[each.array for each in part] for own in parts for part in own]
        return [pairwise(terms) if self.in_tree else np.asarray(functools.reduce(np.add, terms))
                for terms in zip(*shards)]

    def check(self, sums, parts, where=''):
        """Check the sums on the host, and on each context that reads them."""
        expected = self.expected(parts)
        assert len(sums) == self.n
        if all(context.kind == 'cpu' for context in self.contexts):
            assert not any(isinstance(each, host.Sum) for each in sums), 'functions of the CPU take arrays'
        for i in self.own:
            check_same(on_host(sums[i]), expected[i], 'sum %d on the host%s' % (i, where))
        for context, numbers in self.read_on.items():
            for i in numbers:
                there = fetch(on_context(context, sums[i]))
                check_same(there, expected[i], 'sum %d on %s%s' % (i, context.name, where))

    def step(self, seed, like, counts, layouts=('C',)):
        """Carry out a step, and check its sums."""
        parts = self.parts(seed, like, counts, layouts)
        sums = self.sums(parts)
        self.check(sums, parts, ', step %d' % seed)
        self.finish()
        self.check(sums, parts, ', after step %d' % seed)

    def fails(self, parts, errors=Exception):
        """Have a step fail, and drop it."""
        try:
            self.prepare(parts)
        except errors:
            pass
        else:
            raise AssertionError('no error')
        finally:
            self.drop()


def pairwise(terms):
    """Return the sum of terms, added two by two, level by level."""
    while len(terms) > 1:
        terms = [np.add(*terms[i:i + 2]) if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0]


def on_host(value):
    """Return a sum on the host, as results are fetched."""
    return fetch(value.on(HOST) if isinstance(value, host.Sum) else value)


def is_on(context, value):
    """Return whether functions of a context can take an array at its present place."""
    if isinstance(value, np.ndarray):
        return context.kind == 'cpu'
    return context.kind != 'cpu' and value.context.ptr == gpu_context(context).ptr


def on_context(context, value):
    """Return a sum where functions of a context take it."""
    if not isinstance(value, host.Sum):
        return value if is_on(context, value) else copy_to(context, value)
    there = value.on(context)
    assert is_on(context, there), 'a sum is not on %s' % context.name
    return there


def check_same(ours, expected, what):
    """Check that arrays have one shape and dtype, and the same bits; all NaN are the same."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), (what, ours.shape, ours.dtype)
    same = [np.where(each == each, each, np.nan).tobytes() for each in (ours, expected)]
    assert same[0] == same[1], '%s: %s, not %s' % (what, ours.ravel()[:5], expected.ravel()[:5])


# -------------------------------------------------------------------------------------------------------------- cases


def case(function, alone=False):
    """Register a case with each order."""
    for order in ('any', 'tree'):
        CASES['%s, %s' % (function.__name__, order)] = functools.partial(_with_order, function, alone, order)
    return function


def case_of_one_process(function):
    """Register a case of steps that fail: ranks would have to fail together."""
    return case(function, alone=True)


def _with_order(function, alone, order, make, contexts):
    if alone and make.ranks.size > 1:
        return
    make.contexts = contexts
    with warnings.catch_warnings():
        warnings.simplefilter('error', MgpuWarning)  # such as one that the host adds in place of devices
        function(order, make)


def counts_of(make, *counts):
    """Return numbers of shards for the replicas of all ranks: the given ones, in turn, for the last replicas first."""
    n = len(make.contexts) * make.ranks.size
    return [counts[i % len(counts)] for i in range(n)][::-1]


LIKE = [((3, 5), 'float32'), ((), 'float32'), ((LARGE,), 'float32'), ((7,), 'float32')]


@case
def sums(order, make):
    """A sum is the same on the host and on each context that reads it; it has the shape and dtype of its parts."""
    steps = Steps(order, make, 4)
    for seed in range(3):
        steps.step(seed, LIKE, counts_of(make, 1))


@case
def sums_are_found_again(order, make):
    """A sum that is read twice is fetched once, and sent once."""
    steps = Steps(order, make, 4)
    sums = steps.sums(steps.parts(0, LIKE, counts_of(make, 1)))
    for each in sums if isinstance(sums[0], host.Sum) else ():
        assert all(each.on(context) is each.on(context) for context in [HOST, *make.contexts])


@case
def sums_that_are_read_on_the_host_first(order, make):
    """The host and the contexts may read sums in any order, before and after the wait for the devices."""
    steps = Steps(order, make, 4)
    for seed, reads in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
        parts = steps.parts(seed, LIKE, counts_of(make, 1))
        sums, expected = steps.sums(parts), steps.expected(parts)
        for read in reads:
            if read == 0:
                steps.finish()
            elif read == 1:
                for total, value in zip(sums, expected):
                    check_same(on_host(total), value, 'on the host')
            else:
                steps.check(sums, parts)


@case
def shapes(order, make):
    """Scalars, arrays without elements, and arrays that begin at any element of the memory are added."""
    like = [(shape, 'float32') for shape in [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (), (17,), (LARGE, 1), (5,)]]
    steps = Steps(order, make, len(like))
    for seed in range(2):
        steps.step(seed, like, counts_of(make, 1, 2))


@case
def layouts(order, make):
    """Parts lie in memory as a function leaves them: transposed, as every second element, backwards."""
    like = [((4, 6), 'float32'), ((100, 120), 'float32'), ((3, 4, 5), 'float32'), ((9,), 'float32'), ((), 'float32')]
    steps = Steps(order, make, len(like))
    for seed, turned in enumerate([['F'], ['strided'], ['backwards'], ['C', 'strided', 'F', 'backwards']]):
        steps.step(seed, like, counts_of(make, 1), turned)
        steps.step(seed, like, counts_of(make, 2, 1), turned)


@case
def dtypes(order, make):
    """Sums of several dtypes alternate, each small and large."""
    like = [(shape, dtype) for shape in [(), (5, 3), (2 * LARGE,), (0,)] for dtype in make.dtypes]
    steps = Steps(order, make, len(like))
    for seed in range(2):
        steps.step(seed, like, counts_of(make, 1, 2))


@case
def special_values(order, make):
    """Infinities, NaN, zeros with a sign, and the largest and smallest normal numbers are added as IEEE 754 has it.

    In any order, a context without samples may add 0, and so change the sign of a zero: none is without.
    """
    steps = Steps(order, make, 1)
    limits = np.finfo('float32')
    values = [0., -0., np.inf, -np.inf, np.nan, limits.max / 4, limits.tiny, -limits.tiny, 1., -1.]
    terms = np.array(values, 'float32')
    parts = [[[Sent(np.roll(terms, 3 * i) if i % 2 else terms)]] for i in range(len(counts_of(make, 1)))]
    steps.check(steps.sums(parts), parts)


@case
def micro_batches(order, make):
    """Each replica adds its parts of several rounds; some have fewer, and so no part in the last ones."""
    steps = Steps(order, make, 4)
    for seed, counts in enumerate([(2,), (2, 3), (3, 1, 2), (1,), (4, 4, 3)]):
        steps.step(seed, LIKE, counts_of(make, *counts))


@case
def contexts_without_samples(order, make):
    """A context without samples adds nothing, and reads the sums all the same."""
    steps, n = Steps(order, make, 4), len(counts_of(make, 1))
    for seed, replica in enumerate([0, n - 1, 0]):
        steps.step(seed, LIKE, [int(i == replica) for i in range(n)])
        steps.step(seed, LIKE, [2 * (i == replica) for i in range(n)])
        steps.step(seed, LIKE, [int(i != replica) or n == 1 for i in range(n)])


@case
def other_shapes_in_the_next_step(order, make):
    """Sums may have other shapes and dtypes in each step: larger ones, smaller ones, the first ones again."""
    steps = Steps(order, make, 3)
    for seed, sizes in enumerate([(5, 1, 9), (LARGE, 1, 9), (5, LARGE, 0), (0, 0, 0), (5, 1, 9), (5, 2, 9)]):
        like = [((size,), make.dtypes[(i + seed) % len(make.dtypes)]) for i, size in enumerate(sizes)]
        steps.step(seed, like, counts_of(make, 1, 2))
    steps.step(9, [((), 'float32'), ((1,), 'float32'), ((3, 3), 'float32')], counts_of(make, 1))
    steps.step(9, [((), 'float32'), ((1, 1), 'float32'), ((9,), 'float32')], counts_of(make, 1))


@case
def sums_of_several_buckets(order, make):
    """Sums that are too large for one message are added in several, with small ones between them."""
    like = [((HUGE,), 'float32'), ((3,), 'float32'), ((HUGE + 5,), 'float32'), ((), 'float32')]
    steps = Steps(order, make, len(like))
    steps.step(0, like, counts_of(make, 1))


@case
def sums_stay_until_the_next_ones_are_prepared(order, make):
    """Sums keep the values of their step until the next `prepare`, also while the order adds the next parts.

    Copies on a device that were made before stay as long as they are held. A device may still read the memory that the
    host has sent them from, also one that has no samples in the next step.
    """
    steps = Steps(order, make, 4)
    first = steps.parts(0, LIKE, counts_of(make, 1))
    sums = steps.sums(first)
    held = [(i, context, on_context(context, sums[i])) for context in make.contexts for i in range(4)
            if context.kind != 'cpu']
    steps.finish()
    for seed, counts in [(1, (2, 1)), (2, (1, 0)), (3, (0, 1))]:
        if not any(counts_of(make, *counts)):
            counts = 1,
        parts = steps.parts(seed, LIKE, counts_of(make, *counts))
        added = steps.add(parts)
        steps.check(sums, first, ' while the next parts are added')
        steps.channel.prepare(added)
        for i, context, there in held:
            check_same(fetch(there), steps.expected(first)[i], 'sum %d, held on %s' % (i, context.name))
        sums, first = steps.taken(), parts
        held = [(i, context, on_context(context, sums[i])) for context in make.contexts for i in range(4)
                if context.kind != 'cpu']
        steps.check(sums, first)
        steps.finish()


@case
def copies_that_are_still_under_way(order, make):
    """A device gets the sums of its step, even if the next ones are prepared before it has received them.

    It may have no samples in the next step, whose sums may have other shapes.
    """
    n = len(counts_of(make, 1))
    for place in range(n):
        steps, others = Steps(order, make, 1), [int(i != place or n == 1) for i in range(n)]
        for seed, size in enumerate([HUGE // 4, HUGE // 4 + 1]):
            parts = steps.parts(seed, [((HUGE // 4,), 'float32')], counts_of(make, 1))
            (total,), expected = steps.sums(parts), steps.expected(parts)
            following = steps.parts(seed + 2, [((size,), 'float32')], others)
            added = steps.add(following)
            busy = list(map(keep_busy, make.contexts))
            held = [on_context(context, total) for context in make.contexts if context.kind != 'cpu']
            steps.channel.prepare(added)
            for each in held:
                check_same(fetch(each), *expected, 'a sum that is under way')
            del busy
            steps.check(steps.taken(), following)
            steps.finish()


def keep_busy(context):
    """Return arrays that a device works on for milliseconds, before which it receives no others."""
    if context.kind == 'cpu':
        return []
    there, zeros = [memory.DeviceMemory(context).zeros((HUGE,), 'float32') for _ in range(2)]
    for _ in range(8):
        there[...] = zeros
    return [there, zeros]


@case
def sums_are_sent_to_their_readers_alone(order, make):
    """Reading takes memory on a device for the sums that are read there alone, and none where none is read."""
    first, *others = make.contexts
    read_on = {first: [0, 2, 3], **{context: [] for context in others}}
    steps = Steps(order, make, 4, read_on=read_on)
    parts = steps.parts(0, LIKE, counts_of(make, 1))
    sums = steps.sums(parts)
    make.memories.bytes.clear()
    steps.check(sums, parts)
    steps.finish()
    assert set(make.memories.bytes) <= {first}
    most = sum(parts[0][0][i].array.nbytes + 4 * ALIGNED for i in read_on[first])
    assert make.memories.bytes.get(first, 0) <= most, make.memories.bytes


@case_of_one_process
def sums_take_memory_once(order, make):
    """A step takes memory on a device for its large sums once, from its beginning until each context has read them.

    In the order of the tree, a device may need more, for parts of others. Only the CUDA stand-in can tell.
    """
    if order == 'tree' or not is_standin(make.contexts):
        return
    steps, like = Steps(order, make, 2), [((HUGE // 4,), 'float32'), ((HUGE // 8,), 'float32')]
    steps.step(0, like, counts_of(make, 1))
    parts = steps.parts(1, like, counts_of(make, 1))
    added = steps.add(parts)
    peaks(len(make.contexts))
    before = peaks(len(make.contexts))
    steps.channel.prepare(added)
    sums = steps.taken()
    held = [on_context(context, each) for context in make.contexts for each in sums]
    steps.finish()
    for old, new in zip(before, peaks(len(make.contexts))):
        assert new - old < 1.2 * sum(each.array.nbytes for each in parts[0][0]), (old, new)
    for each, value in zip(held, steps.expected(parts) * len(make.contexts)):
        check_same(fetch(each), value, 'a sum that is held')


@case_of_one_process
def sums_of_a_step_are_freed(order, make):
    """Once a step has ended, or is dropped, the channel holds no sums on devices; only the CUDA stand-in can tell."""
    if not is_standin(make.contexts):
        return
    n, steps, size = len(make.contexts), Steps(order, make, 1), HUGE // 4

    def end(parts):
        for each in steps.sums(parts):
            on_context(make.contexts[-1], each)
        steps.finish()

    def drop(parts):
        steps.prepare(parts)
        steps.drop()
    for act in (end, drop):
        end(steps.parts(0, [((5,), 'float32')], counts_of(make, 1)))
        parts = steps.parts(0, [((size,), 'float32')], counts_of(make, 1))
        peaks(n)
        before = peaks(n)
        act(parts)
        gc.collect()
        peaks(n)
        kept = [new - old for old, new in zip(before, peaks(n))]
        assert max(kept) < size, (act.__name__, kept)


@case
def owners(order, make):
    """A sum with an owner is right where its owner reads it, and on the host; others may have an owner, or none."""
    n, first = len(counts_of(make, 1)), make.ranks.rank * len(make.contexts)
    like = [((LARGE + i,), 'float32') for i in range(4)] + [((3,), 'float32'), ((), 'float32')]
    for owned in [0, n - 1, None, 0, n - 1, None], [0, 0, 0, n - 1, n - 1, n - 1]:
        read_on = {context: [i for i, owner in enumerate(owned) if owner in (place, None)]
                   for place, context in enumerate(make.contexts, first)}
        steps = Steps(order, make, len(like), owned, read_on)
        for seed, counts in enumerate([(1,), (2, 1), (0, 1) if n > 1 else (1,), (1,)]):
            steps.step(seed, like, counts_of(make, *counts))


@case
def sums_of_an_owner_take_no_memory_elsewhere(order, make):
    """A device has no memory for large sums of others, from the beginning of a step to its end."""
    n, first = len(counts_of(make, 1)), make.ranks.rank * len(make.contexts)
    like = [((LARGE * 4,), 'float32')] * 2 + [((3,), 'float32')]
    read_on = {context: [0, 1, 2] if place == n - 1 else [2] for place, context in enumerate(make.contexts, first)}
    steps = Steps(order, make, 3, [n - 1, n - 1, None], read_on)
    parts = steps.parts(0, like, counts_of(make, 1))
    make.memories.bytes.clear()
    sums = steps.sums(parts)
    steps.check(sums, parts)
    steps.finish()
    others = [context for context in make.contexts if 0 not in read_on[context]]
    for context in others if order == 'any' else ():  # in the tree, a device has room for a piece
        assert make.memories.bytes.get(context, 0) < LARGE * 4, make.memories.bytes


@case
def two_channels_in_one_step(order, make):
    """A step has several groups of sums: a channel prepares its sums before another one's are taken."""
    one, other = Steps(order, make, 4), Steps(order, make, 2)
    for seed in range(2):
        parts = one.parts(seed, LIKE, counts_of(make, 1, 2))
        others = other.parts(5 + seed, [((4,), 'float32'), ((LARGE,), 'float32')], counts_of(make, 1, 2))
        one.prepare(parts)
        other.prepare(others)
        sums = one.taken()
        one.check(sums, parts)
        its = other.taken()
        other.check(its, others)
        one.check(sums, parts)
        for each in (one, other):
            each.finish()


# ------------------------------------------------------------------------------------------------------------- errors


@case
def drops_at_any_time(order, make):
    """A step may be dropped at any time: before the first one, between rounds, prepared, taken, ended; twice, too."""
    steps, n_rounds = Steps(order, make, 4), 3
    steps.drop()
    parts = steps.parts(0, LIKE, counts_of(make, n_rounds, 2))
    for number, begin in enumerate([functools.partial(steps.add, parts, 1), functools.partial(steps.add, parts, 2),
                                    functools.partial(steps.add, parts), functools.partial(steps.prepare, parts),
                                    functools.partial(steps.sums, parts), steps.finish]):
        begin()
        steps.drop()
        steps.step(number, LIKE, counts_of(make, 1, 2))
        begin()
        steps.drop()
        steps.drop()
        steps.step(number, LIKE, counts_of(make, 2, 1))


@case
def a_step_without_a_drop(order, make):
    """A step that is left between rounds, or prepared, is replaced by the next one, also without `drop`."""
    steps = Steps(order, make, 4)
    parts = steps.parts(0, LIKE, counts_of(make, 3))
    steps.add(parts, 1)
    steps.step(1, LIKE, counts_of(make, 1, 2))
    steps.add(parts, 2)
    steps.step(2, LIKE, counts_of(make, 2, 1))
    steps.add(parts, 1)
    steps.step(2, LIKE, [2 * (i == 0) for i in range(len(parts))])
    steps.prepare(parts)
    steps.step(3, LIKE, counts_of(make, 1))


WRONG = [((4, 3), (3, 4)), ((5,), (1,)), ((1,), (5,)), ((), (1,)), ((LARGE,), (LARGE + 1,)), ((HUGE,), (HUGE - 1,))]


@case_of_one_process
def parts_of_different_shapes_are_an_error(order, make):
    """Replicas whose parts have different shapes are an error, and no sum, also of as many elements, or of one.

    The next step has the right sums.
    """
    n = len(make.contexts)
    for number, (shape, other) in enumerate(WRONG if n > 1 else ()):
        for dtype in make.dtypes if number < 4 else ['float32']:
            steps, like = Steps(order, make, 3), [(shape, dtype), ((7,), dtype), ((2,), dtype)]
            steps.step(1, like, counts_of(make, 1))
            parts, others = steps.parts(0, like, [1] * n), steps.parts(0, [(other, dtype), *like[1:]], [1] * n)
            odd = number % 2 * (n - 1)
            steps.fails([others[i] if i == odd else parts[i] for i in range(n)])
            steps.step(2, like, counts_of(make, 1))


@case_of_one_process
def parts_of_different_shapes_in_a_round_are_an_error(order, make):
    """So are parts of one replica's micro-batches or shards."""
    for dtype in make.dtypes:
        for shape, other in [((4, 3), (4, 2)), ((LARGE,), (LARGE + 1,))]:
            for odd in range(4):
                steps, like = Steps(order, make, 2), [((7,), dtype), (shape, dtype)]
                parts = steps.parts(0, like, counts_of(make, 4))
                parts[0][odd] = steps.parts(0, [((7,), dtype), (other, dtype)], counts_of(make, 1))[0][0]
                steps.fails(parts)
                steps.step(2, like, counts_of(make, 2, 1))


@case_of_one_process
def parts_of_other_shapes_that_could_be_added_are_an_error(order, make):
    """Shapes of as many elements, or that NumPy could broadcast, are different shapes, too, also in a round."""
    missed = []
    for dtype in make.dtypes:
        for shape, other in WRONG[:4]:
            for odd in range(4):
                steps, like = Steps(order, make, 2), [((7,), dtype), (shape, dtype)]
                parts = steps.parts(0, like, counts_of(make, 4))
                parts[0][odd] = steps.parts(0, [((7,), dtype), (other, dtype)], counts_of(make, 1))[0][0]
                with contextlib.suppress(AssertionError):
                    steps.fails(parts)
                    continue
                missed.append((dtype, shape, other, odd))
    assert not missed, 'no error: %s' % missed


@case_of_one_process
def a_part_that_is_no_array_is_an_error(order, make):
    """An error of one part, in any round, leaves nothing behind that the next step could add."""
    steps, n = Steps(order, make, 4), len(counts_of(make, 1))
    for seed, (replica, number) in enumerate([(0, 0), (n - 1, 0), (n - 1, 1)]):
        parts = steps.parts(seed, LIKE, counts_of(make, 2))
        parts[replica][number][3] = NoArray()
        steps.fails(parts)
        steps.step(seed, LIKE, counts_of(make, 1, 2))


class NoArray:
    """A part that a function has left by mistake."""

    array = np.zeros(7, 'float32')

    def on(self, context):
        return 'no array'


@case_of_one_process
def a_device_without_memory_is_an_error(order, make):
    """Each allocation of a step may fail; the next step has the right sums.

    Only the CUDA stand-in can fail so.
    """
    steps = Steps(order, make, 4)
    steps.step(0, LIKE, counts_of(make, 2))
    for place, context in enumerate(make.contexts if is_standin(make.contexts) else ()):
        number, failed = 0, True
        while failed:
            parts = steps.parts(number, LIKE, counts_of(make, 2))
            added = [[[each.on(own) for each in part] for part in shards] for shards, own in zip(parts, make.contexts)]
            there = [[[Ready(each.array, value) for each, value in zip(part, values)] for part, values in zip(*each)]
                     for each in zip(parts, added)]
            try:
                with lacking_memory(place, number):
                    sums = steps.sums(there)
                    for each in sums:
                        on_context(context, each)
                failed = False
                steps.check(sums, parts)
            except Exception as error:
                assert 'memory' in str(error).lower(), repr(error)
            steps.drop()
            steps.step(number, LIKE, counts_of(make, 1, 2))
            number += 1
        assert number > 1


class Ready(NamedTuple):
    """A part that is on its context already."""

    array: np.ndarray
    there: object

    def on(self, context):
        return self.there


def is_standin(contexts):
    """Return whether contexts are on devices of the CUDA stand-in, and each array is an allocation of its own."""
    if contexts[0].kind != 'cuda' or theano.config.gpuarray.preallocate != -1:
        return False
    return hasattr(ctypes.CDLL('libcuda.so'), 'cudaOnCpuFailAllocAfter')


@contextlib.contextmanager
def lacking_memory(device, number):
    """Have an allocation of a device fail in the ``with`` block, after some others."""
    driver = ctypes.CDLL('libcuda.so')
    driver.cudaOnCpuFailAllocAfter(device, ctypes.c_long(number))
    try:
        yield
    finally:
        driver.cudaOnCpuFailAllocAfter(device, ctypes.c_long(-1))


@case_of_one_process
def ctrl_c_at_any_line(order, make):
    """Ctrl-C may come at each line of a step, of two rounds; the next step has the right sums."""
    steps = Steps(order, make, 2)
    files = [each.__file__ for each in (orders, host, memory, layout, copies, nccl_channel, tree_devices)]
    like, number, interrupted = [((3,), 'float32'), ((LARGE,), 'float32')], 1, True
    before = sys.gettrace()  # a tool that measures coverage goes on afterwards
    while interrupted:
        parts = steps.parts(number, like, counts_of(make, 2))
        sys.settrace(interrupting_at(number, files))
        try:
            sums = steps.sums(parts)
            for context in make.contexts:
                for each in sums:
                    on_context(context, each)
            steps.finish()
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        steps.drop()
        steps.step(number, like, counts_of(make, 1, 2))
        number += 1 if number < 20 else 17


@case_of_one_process
def nothing_holds_the_parts_of_a_step(order, make):
    """Once a step has ended, or is dropped, at any time, neither the channel nor the order holds its parts.

    They may be as large as all parameters. Without a channel the sums are parts, which their readers hold.
    """
    steps = Steps(order, make, 4)

    def ended(parts):
        sums = steps.sums(parts)
        for each in sums:
            on_host(each)
        steps.finish()

    def dropped(parts):
        steps.prepare(parts)
        steps.drop()

    def left(parts):
        steps.add(parts, 1)
        steps.drop()

    for act in (ended, dropped, left):
        for rounds in (1, 2):
            assert not held_after(act, steps, rounds), '%s, %d rounds: parts are held' % (act.__name__, rounds)


@case_of_one_process
def nothing_holds_the_parts_of_a_failed_step(order, make):
    """So it is where the last replica's parts cannot be fetched, or added, while the ones before could."""
    steps = Steps(order, make, 4)

    def failed(parts):
        parts[-1][-1][-1] = NoArray()
        steps.fails(parts)
    for rounds in (1, 2):
        held = held_after(failed, steps, rounds)
        assert not held, '%d rounds: parts %s are held' % (rounds, held)


def held_after(act, steps, rounds):
    """Return the numbers of the parts of a step that something holds after it.

    Parameters
    ----------
    act : callable
        It carries out the step, with the parts, which are on their contexts.
    steps : Steps
    rounds : int
    """
    counts = counts_of(steps.make, rounds, 1)
    steps.step(0, LIKE, counts)  # memory and kernels are there
    there = [[[Ready(each.array, each.on(own)) for each in part] for part in shards]
             for shards, own in zip(steps.parts(2, LIKE, counts), steps.contexts)]
    arrays = [each.there for shards in there for part in shards for each in part]
    before = list(map(sys.getrefcount, arrays))
    act(there)
    gc.collect()
    return [i for i, (old, new) in enumerate(zip(before, map(sys.getrefcount, arrays))) if new > old]


# ----------------------------------------------------------------------------------------------------------- programs


def failures(make, contexts):
    """Run all cases; return the failed ones, each with its error."""
    failed = []
    for name, run in CASES.items():
        try:
            run(make, contexts)
        except Exception:
            failed.append('%s: %s' % (name, traceback.format_exc()))
    return failed
