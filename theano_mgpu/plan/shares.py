"""The ranks of a job, and the samples of a batch that each replica works on."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence, Tuple

import numpy as np

Span = Tuple[int, int]


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
    overlap : tuple of bool
        Whether each rank has the flag ``mgpu.overlap=True``.
    half : tuple of bool
        Whether each rank has the flag ``mgpu.exchange=float16``.
    against_nccl : str
        The reason why devices do not exchange sums by NCCL; empty if they do.
    """

    rank: int = 0
    replicas: tuple[int, ...] = (1,)
    update_on: tuple[str, ...] = ('device',)
    overlap: tuple[bool, ...] = (False,)
    half: tuple[bool, ...] = (False,)
    against_nccl: str = 'NCCL is not installed'

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
    machine : Machine
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

    Examples
    --------
    >>> shares = Shares(Machine(rank=1, replicas=(1, 2)), micro_batches=2)
    >>> shares.lengths(7), shares.rounds(7)
    ([3, 4], [[(3, 4), (5, 6)], [(4, 5), (6, 7)]])
    """

    machine: Machine
    is_divided: bool = True
    is_sharded: bool = False
    micro_batches: int = 1
    least_samples: int = 1
    grows: bool = False

    @property
    def n_replicas(self) -> int:
        """The number of replicas, on all ranks, among which a batch is divided."""
        return self.machine.n_replicas if self.is_divided else 1

    def lengths(self, length: int) -> list[int]:
        """Return the number of samples of a whole batch that each rank works on."""
        replicas = self.machine.replicas
        if not self.is_divided or len(replicas) == 1:
            return [length] * len(replicas)
        sizes = sub_batch_sizes(length, sum(replicas), self.least_samples)
        return [sum(sizes[start:stop]) for start, stop in ranges(replicas)]

    def rounds(self, length: int, slices: int | None = None) -> list[list[Span]]:
        """Return the first and one-past-last sample of each replica of this rank, one list a micro-batch.

        Parameters
        ----------
        length : int
            Samples of this rank's own, where it is given its own; else of the whole batch.
        slices : int, optional
            In place of `micro_batches`.
        """
        if not length or not self.is_divided:
            return [[(0, length)]] if length else []
        first, stop = ranges(self.machine.replicas)[self.machine.rank]
        n = stop - first if self.is_sharded else self.machine.n_replicas
        rounds = micro_batch_rounds(length, n, slices or self.micro_batches, self.least_samples)
        rounds = rounds if self.is_sharded else [spans[first:stop] for spans in rounds]
        return [spans for spans in rounds if spans]


    def most_slices(self, lengths: Sequence[int]) -> int:
        """Return the largest number of slices that changes anything, on any rank.

        Parameters
        ----------
        lengths : list of int
            Samples that each rank is given: of its own, or the whole batch.

        Examples
        --------
        >>> Shares(Machine(replicas=(2,))).most_slices([7])
        4
        """
        given = zip(lengths, self.machine.replicas) if self.is_sharded else [(lengths[0], self.machine.n_replicas)]
        largest = max(sub_batch_sizes(length, n, self.least_samples)[0] for length, n in given if length)
        return max(1, largest // self.least_samples) if self.is_divided else 1


def sub_batch_sizes(batch_size: int, n_replicas: int, least: int = 1) -> list[int]:
    """Split a batch size into near-equal sub-batch sizes, largest first.

    Parameters
    ----------
    batch_size : int
        Samples in the whole batch, at least 1.
    n_replicas : int
        Replicas to feed, at least 1.
    least : int
        Samples that each sub-batch has at least, but for a batch that has fewer.

    Returns
    -------
    list of int
        Sizes that sum to `batch_size` and differ by at most one, none zero; fewer than
        `n_replicas` when samples are fewer.

    Raises
    ------
    ValueError
        If either argument is less than 1.

    Examples
    --------
    >>> sub_batch_sizes(10, 4)
    [3, 3, 2, 2]
    >>> sub_batch_sizes(2, 4)
    [1, 1]
    >>> sub_batch_sizes(5, 4, least=2)
    [3, 2]
    """
    if batch_size < 1 or n_replicas < 1:
        raise ValueError('batch size and number of replicas must be at least 1, not %r and %r'
                         % (batch_size, n_replicas))
    n_parts = max(1, min(batch_size // least, n_replicas))
    share, extra = divmod(batch_size, n_parts)
    return [share + 1] * extra + [share] * (n_parts - extra)


def ranges(sizes: Sequence[int], start: int = 0) -> list[Span]:
    """Return the first and one-past-last sample of consecutive sizes.

    Examples
    --------
    >>> ranges([3, 3, 2])
    [(0, 3), (3, 6), (6, 8)]
    """
    stops = [start + int(stop) for stop in np.cumsum(sizes)]
    return list(zip([start] + stops[:-1], stops))


def micro_batch_rounds(batch_size: int, n_replicas: int, micro_batches: int, least: int = 1) -> list[list[Span]]:
    """Return the samples that each replica works on, one round after the other.

    Parameters
    ----------
    batch_size, n_replicas : int
    micro_batches : int
        Slices that each sub-batch is cut into, fewer where it has fewer samples.
    least : int
        Samples that a slice has at least, but for a batch that has fewer.

    Returns
    -------
    list of list of (int, int)
        One list a round; its entries are the sample ranges of replicas 0, 1, and so on.

    Examples
    --------
    >>> micro_batch_rounds(5, 2, 2)
    [[(0, 2), (3, 4)], [(2, 3), (4, 5)]]
    """
    slices = [ranges(sub_batch_sizes(stop - start, micro_batches, least), start)
              for start, stop in ranges(sub_batch_sizes(batch_size, n_replicas, least))]
    # Sub-batches are largest first, and so are their numbers of slices.
    return [[of_replica[round_] for of_replica in slices if round_ < len(of_replica)]
            for round_ in range(len(slices[0]))]
