"""The speeds of the replicas of a function, measured in its steps, and the shares of a batch that follow from them."""
from __future__ import annotations

import collections
import statistics
from dataclasses import replace
from typing import Deque, Mapping, Sequence

from ..plan.record import note_change
from ..plan.shares import ranges, weighted_sizes
from .batch import Split, Splitter

MEASUREMENTS = 5     # of each replica: shares follow their median
EVERY = 20           # steps from one measurement to the next, once each replica has that many
SETTLING = 60        # steps after which the shares of a size count as settled
COMMON = 20          # steps in a row with smaller batches, after which their size is the one that counts
DIFFERENT = 1.15     # shares change if one replica works this many times as long as another one,
BETTER = 1.03        # and the step gets shorter by this factor
AGAIN = 500          # steps after which a replica that was too slow for any sample is tried again
PRECISION = 1000     # the weight of the fastest replica


class Speeds:
    """The measured speeds of replicas: they change the shares of the batches that a splitter splits.

    Only steps with a batch of the largest size count, or of the size that has become common. In a step that measures,
    one replica of each process is launched last and waited for. The ranks send each other the times with the last
    message of the step, so that all of them change the shares in the same step.
    """

    def __init__(self, name: str | None, splitter: Splitter) -> None:
        self._name, self._splitter = name or 'a function', splitter
        self._samples = self._steps = 0
        self._others = 0  # steps in a row with a smaller batch
        self._lengths: Sequence[int] = ()  # samples that each rank was given: of its own, or the whole batch
        self._has_told = False
        self._forget()

    def _forget(self) -> None:
        self._turns = 0                               # steps that have measured
        self._measured: dict[int, Deque[float]] = {}  # seconds a sample, by the number of the replica

    @property
    def is_settled(self) -> bool:
        """Return whether the shares will stay about as they are, so that the time of a step counts for a choice."""
        shares = self._splitter.shares
        return not shares.adapts or self._others > 0 or self._steps >= SETTLING or \
            self._has_measured(1) and self._balanced() == shares.weights

    def timed(self, split: Split) -> int | None:
        """Return the replica of this process that a step has to time; None if the step measures nothing."""
        shares = self._splitter.shares
        if not shares.adapts or split.samples != self._samples or \
                self._has_measured(MEASUREMENTS) and self._steps % EVERY:
            return None
        return self._turns % shares.machine.replicas[shares.machine.rank]

    def report(self, split: Split, timed: int | None, seconds: float) -> list[int]:
        """Return the numbers that the ranks tell each other: a replica, its samples, and its nanoseconds.

        The replica is the one that `timed` has returned for this split.
        """
        if timed is None:
            return []
        machine = self._splitter.shares.machine
        spans = [] if split.idle else [shard.span for shard in split.shards if shard.replica == timed]
        return [sum(machine.replicas[:machine.rank]) + timed, sum(stop - start for start, stop in spans),
                int(1e9 * seconds)]

    def note(self, split: Split, reports: Sequence[Sequence[int]]) -> bool:
        """Note the end of a step, and the reports of the ranks; return whether the shares have changed."""
        shares = self._splitter.shares
        if not shares.adapts or not self._is_of_size(split):
            return False
        self._steps += 1
        self._turns += bool(reports)
        for replica, samples, nanoseconds in reports:
            if samples:
                measured = self._measured.setdefault(replica, collections.deque(maxlen=MEASUREMENTS))
                measured.append(1e-9 * nanoseconds / samples)
        new = shares.weights
        if 0 in new and self._steps % AGAIN == 0:
            new = tuple(weight or 1 for weight in new)
        elif reports and self._has_measured(MEASUREMENTS):
            new = self._balanced()
        if new == shares.weights:
            return False
        self._splitter.use(replace(shares, weights=new), self._lengths)
        self._forget()
        self._tell()
        return True

    def _is_of_size(self, split: Split) -> bool:
        """Return whether a batch has the size that counts; begin anew with a larger one, or one that is common now."""
        self._others = 0 if split.samples == self._samples else self._others + 1
        if split.samples > self._samples or self._others >= COMMON:
            shares = self._splitter.shares
            self._samples, self._steps, self._others = split.samples, 0, 0
            self._lengths = split.lengths if shares.is_sharded else [split.samples]
            self._forget()
            return False  # the first step of a size is slower
        return not self._others

    def _has_measured(self, times: int) -> bool:
        return self._turns >= times * max(self._splitter.shares.machine.replicas)

    def _balanced(self) -> tuple[int, ...]:
        """Return the weights with which the replicas work equally long, by their times so far."""
        shares = self._splitter.shares
        seconds = {replica: statistics.median(measured) for replica, measured in self._measured.items()}
        sizes, weights = shares.sizes(self._lengths), list(shares.weights)
        # Each rank that is given samples of its own divides them among its own replicas.
        for start, stop in ranges(shares.machine.replicas) if shares.is_sharded else [(0, len(sizes))]:
            own = {replica - start: time for replica, time in seconds.items() if start <= replica < stop}
            changed = balanced(sizes[start:stop], own, shares.least_samples)
            if changed:
                weights = weights or [1] * len(sizes)
                weights[start:stop] = changed
        return tuple(weights)

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            sizes = self._splitter.shares.sizes(self._lengths)
            note_change('%s: batches of %d samples are divided into %s, by the speeds of the devices '
                        '(mgpu.shares=auto)' % (self._name, self._samples, ' + '.join(map(str, sizes))))


def balanced(sizes: Sequence[int], seconds: Mapping[int, float], least: int = 1) -> list[int] | None:
    """Return the weights of shares with which replicas work equally long; None if the shares do well as they are.

    Replica i works on ``sizes[i]`` samples now, and takes ``seconds[i]`` for each.

    Examples
    --------
    >>> balanced([64, 64], {0: .001, 1: .003}), balanced([96, 32], {0: .001, 1: .0031})
    ([1000, 333], None)
    >>> balanced([127, 1], {0: .001, 1: .9})  # even one sample takes too long
    [1000, 0]
    """
    times = {replica: seconds[replica] * size for replica, size in enumerate(sizes) if size and replica in seconds}
    if len(times) < 2 or len(times) < sum(map(bool, sizes)):
        return None
    longest, slowest = max((time, replica) for replica, time in times.items())
    if longest <= DIFFERENT * min(times.values()):
        return None
    fastest = min(seconds[replica] for replica in times)
    weights = [max(1, round(PRECISION * fastest / seconds[replica])) if replica in times else 0
               for replica in range(len(sizes))]
    if sizes[slowest] <= least:
        weights[slowest] = 0
    new = weighted_sizes(sum(sizes), weights, least)
    if max(seconds[replica] * new[replica] for replica in times) * BETTER > longest:
        return None
    return weights
