"""The ranks of a job, and the samples of a batch that each replica works on."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence, Tuple

import numpy as np

from ..errors import ContextError
from ..options import EQUAL
from ..parsing import ratio

Span = Tuple[int, int]
Work = Tuple[int, Span]  # the number of a replica, and its samples


@dataclass(frozen=True)
class Machine:
    """The processes of a job with their devices and flags: the same on every rank, but for `rank`.

    It is gathered once for a function (`runtime.consensus.gather_machine`), so that planning exchanges nothing.

    Attributes
    ----------
    rank : int
        The number of this process.
    replicas : tuple of int
        Replicas of each rank.
    update_on : tuple of str
        The place where each rank would compute new values, one of `options.UPDATE_ON`.
    overlap : tuple of (bool or str)
        The flag ``mgpu.overlap`` of each rank; True where the times of steps have decided so.
    against_nccl : str
        The reason why devices do not exchange sums by NCCL; empty if they do.
    rate : float
        Bytes of sums a second that devices exchange by NCCL, measured when they were connected; 0 if that is unknown.
    """

    rank: int = 0
    replicas: tuple[int, ...] = (1,)
    update_on: tuple[str, ...] = ('device',)
    overlap: tuple[bool | str, ...] = (False,)
    against_nccl: str = 'NCCL is not installed'
    rate: float = 0

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.replicas)

    @property
    def n_replicas(self) -> int:
        """The number of replicas of all ranks."""
        return sum(self.replicas)


@dataclass(frozen=True)
class Shares:
    """The way in which a batch is divided among ranks, replicas and micro-batches.

    Attributes
    ----------
    is_divided : bool
        Whether a batch is divided among replicas; else each process computes all of it on its first replica.
    is_sharded : bool
        Whether each rank is given samples of its own.
    micro_batches : int
        Slices of a sub-batch.
    least_samples : int
        Samples that a slice has at least, but for a batch that has fewer.
    grows : bool
        Whether a batch is cut into more slices where a device has too little memory.
    weights : tuple of int
        The share of each replica of all ranks, in proportion to the others. Empty for equal shares.
    adapts : bool
        Whether shares follow the speeds of the replicas, as they are measured.
    logical_shards : int
        Parts that a batch is divided into, whatever the number of replicas is; each replica computes some of them, one
        after the other. 0 for one part a replica.

    Examples
    --------
    >>> shares = Shares(Machine(rank=1, replicas=(1, 2)), micro_batches=2)
    >>> shares.lengths(7), shares.rounds(7)
    ([3, 4], [[(0, (3, 4)), (1, (5, 6))], [(0, (4, 5)), (1, (6, 7))]])
    >>> Shares(Machine(replicas=(2,)), weights=(3, 1)).rounds(8)
    [[(0, (0, 6)), (1, (6, 8))]]
    >>> Shares(Machine(replicas=(2,)), logical_shards=3).rounds(7)
    [[(0, (0, 2)), (1, (4, 7))], [(0, (2, 4))]]
    """

    machine: Machine
    is_divided: bool = True
    is_sharded: bool = False
    micro_batches: int = 1
    least_samples: int = 1
    grows: bool = False
    weights: tuple[int, ...] = ()
    adapts: bool = False
    logical_shards: int = 0

    @property
    def n_replicas(self) -> int:
        """The number of replicas, on all ranks, among which a batch is divided."""
        return self.machine.n_replicas if self.is_divided else 1

    def slices(self, lengths: Sequence[int], number: int | None = None) -> list[list[Span]]:
        """Return the ranges of samples that each replica of all ranks computes one after the other.

        They are ranges of the samples that its rank is given: each rank is given some of its own, or the whole batch.
        Without a `number` of slices, it is `micro_batches`. Of logical shards, each is a slice.
        """
        ranks = ranges(self.machine.replicas) if self.is_sharded else [(0, self.machine.n_replicas)]
        return [spans for length, of_rank in zip(lengths, ranks) for spans in self._slices(length, of_rank, number)]

    def _slices(self, length: int, replicas: Span, number: int | None = None) -> list[list[Span]]:
        """Return the slices of some samples for the replicas of a range."""
        weights = (self.weights or (1,) * self.machine.n_replicas)[slice(*replicas)]
        if self.logical_shards:
            of_rank = self.logical_shards // (self.machine.size if self.is_sharded else 1)
            shards = ranges(even_sizes(length, of_rank, self.least_samples))
            return [shards[first:last] for first, last in ranges(weighted_sizes(len(shards), weights))]
        return [ranges(equal_sizes(stop - start, number or self.micro_batches, self.least_samples), start)
                for start, stop in ranges(weighted_sizes(length, weights, self.least_samples))]

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Return the samples of each replica of all ranks; `lengths` as for `slices`.

        Examples
        --------
        >>> Shares(Machine(replicas=(2, 1))).sizes([8, 8])
        [3, 3, 2]
        >>> Shares(Machine(replicas=(2, 1)), is_sharded=True).sizes([4, 8])
        [2, 2, 8]
        """
        return [sum(stop - start for start, stop in spans) for spans in self.slices(lengths, 1)]

    def shards_of_ranks(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the number of logical shards that each rank computes; `lengths` as for `slices`."""
        return tuple(self._by_rank(self.shards_of_replicas(lengths)))

    def shards_of_replicas(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the number of logical shards that each replica of all ranks computes; `lengths` as for `slices`."""
        return tuple(map(len, self.slices(lengths)))

    def lengths(self, length: int) -> list[int]:
        """Return the number of samples of a whole batch that each rank works on."""
        return self._by_rank(self.sizes([length])) if self.is_divided else [length] * self.machine.size

    def _by_rank(self, of_replicas: Sequence[int]) -> list[int]:
        """Return the sum of the numbers of each rank's replicas."""
        return [sum(of_replicas[start:stop]) for start, stop in ranges(self.machine.replicas)]

    def rounds(self, length: int, number: int | None = None) -> list[list[Work]]:
        """Return the work of this rank, one list a micro-batch: replicas, each with its first and one-past-last sample.

        The `length` is of its own samples, where it is given its own; else of the whole batch. The `number` of slices
        is as for `slices`.
        """
        if not length or not self.is_divided:
            return [[(0, (0, length))]] if length else []
        own = ranges(self.machine.replicas)[self.machine.rank]
        slices = self._slices(length, own, number) if self.is_sharded else self.slices([length], number)[slice(*own)]
        return [[(replica, spans[i]) for replica, spans in enumerate(slices) if i < len(spans)]
                for i in range(max(map(len, slices)))]

    def most_slices(self, lengths: Sequence[int]) -> int:
        """Return the largest number of slices that changes anything, on any rank; of logical shards, their number.

        Examples
        --------
        >>> Shares(Machine(replicas=(2,))).most_slices([7])
        4
        """
        if not self.is_divided:
            return 1
        if self.logical_shards:
            return max(1, *self.shards_of_replicas(lengths))
        return max(1, max(self.sizes(lengths)) // self.least_samples)


def even_sizes(length: int, number: int, least: int = 1) -> list[int]:
    """Return the sizes of logical shards: near-equal, none empty, and fewer where there are too few samples.

    If a number of processes divides the number of shards, and each process has as many samples, then its part of the
    sizes is the sizes of its own samples.

    Examples
    --------
    >>> even_sizes(20, 8), even_sizes(10, 4), even_sizes(2, 4), even_sizes(0, 4)
    ([2, 3, 2, 3, 2, 3, 2, 3], [2, 3, 2, 3], [1, 1], [])
    """
    n = min(number, max(1, length // least)) if length else 0
    return [length * (i + 1) // n - length * i // n for i in range(n)]


def weights_for(flag: str, machine: Machine) -> tuple[int, ...]:
    """Return the weights of the replicas that the flag ``mgpu.shares`` gives; none if it gives no numbers.

    Raises
    ------
    ContextError
        If there are more or fewer replicas.
    """
    weights = ratio(flag) or ()
    if machine.n_replicas == 1:
        return ()
    if len(weights) not in (0, machine.n_replicas):
        raise ContextError('mgpu.shares=%s has %d numbers, and a batch is divided among %d contexts: give one number '
                           'for each, or auto' % (flag, len(weights), machine.n_replicas))
    return weights


def against_speeds(flags: Any, mesh: Any, machine: Machine) -> str:
    """Return the reason why shares are equal, whatever the speeds; empty if they follow the speeds.

    Parameters
    ----------
    mesh : Mesh
        The contexts of this process.
    """
    if flags.shares == EQUAL:
        return 'mgpu.shares=equal, or deterministic=more'
    if len(mesh.places) > 1:
        return 'the model is placed: a replica has several devices'
    if machine.size == 1 and all(context.kind == 'cpu' for context in mesh.contexts):
        return 'the contexts share the processor'
    return ''


def equal_sizes(length: int, number: int, least: int = 1) -> list[int]:
    """Return near-equal sizes of slices, largest first, each of at least `least` samples: fewer than the number then.

    Examples
    --------
    >>> equal_sizes(10, 4), equal_sizes(2, 4), equal_sizes(5, 4, least=2), equal_sizes(0, 4)
    ([3, 3, 2, 2], [1, 1], [3, 2], [])
    """
    return [size for size in weighted_sizes(length, [1] * number, least) if size]


def weighted_sizes(batch_size: int, weights: Sequence[int], least: int = 1) -> list[int]:
    """Split a batch size into sub-batch sizes in proportion to weights, by the largest remainder.

    Each has at least `least` samples, or none: in a batch with too few samples, replicas with the smallest weights get
    none, and so does a replica with the weight 0.

    Examples
    --------
    >>> weighted_sizes(10, [3, 1]), weighted_sizes(10, [1, 0, 2]), weighted_sizes(3, [1, 50, 1])
    ([8, 2], [3, 0, 7], [1, 1, 1])
    >>> weighted_sizes(5, [7, 2, 1], least=2)
    [3, 2, 0]
    """
    by_weight = sorted((i for i, weight in enumerate(weights) if weight), key=lambda i: -weights[i])
    taking = by_weight[:max(1, batch_size // least)]
    sizes, left = [0] * len(weights), batch_size
    # Replicas whose part would be too small get the least number; the others divide the rest.
    for i in reversed(taking[1:]):
        total = sum(weights[j] for j in taking)
        if left * weights[i] >= least * total:
            break
        sizes[i] = least
        left -= least
        taking.remove(i)
    total = sum(weights[j] for j in taking)
    remainders = {}
    for i in taking:
        sizes[i], remainders[i] = divmod(left * weights[i], total)
    for i in sorted(taking, key=lambda i: (-remainders[i], i))[:batch_size - sum(sizes)]:
        sizes[i] += 1
    return sizes


def ranges(sizes: Sequence[int], start: int = 0) -> list[Span]:
    """Return the first and one-past-last sample of consecutive sizes.

    Examples
    --------
    >>> ranges([3, 3, 2])
    [(0, 3), (3, 6), (6, 8)]
    """
    stops = [start + int(stop) for stop in np.cumsum(sizes)]
    return list(zip([start] + stops[:-1], stops))
