"""The choice between one device and several: calls are timed in both ways, and the faster way goes on."""
from __future__ import annotations

import enum
import math
import statistics
import time
from typing import Any, Callable, Mapping

from ..comm.activities import SHARE
from ..comm.communicator import Communicator

WARM_UP = 3        # calls before those that count: kernels are built, buffers are allocated
COUNTED = 5        # calls that count, in each way
SHORTEST = 0.5e-3  # seconds; a call that takes less on one device stays there: a step over contexts costs about as much
LONGEST = 10e-3    # seconds; a call that takes more over contexts stays there, unless long calls are timed, too
GROWN = 4          # times the seconds of a call on one device, after which the choice is made anew
PATIENCE = 2.0     # seconds of long calls in one way, after which fewer than COUNTED do


class Way(enum.Enum):
    """A way to compute a call."""

    ONE = 'one device'
    SEVERAL = 'several contexts'


class State(enum.Enum):
    """The treatment of the next call by a Chooser."""

    TIMES_ONE = 'computes it on one device, and times it'
    TIMES_SEVERAL = 'computes it over the contexts, and times it'
    ONE = 'computes it on one device'
    SEVERAL = 'computes it over the contexts'
    RESTS = 'computes it on one device, and times ever fewer calls, which may have grown'


class Chooser:
    """The choice between one device and several, for calls that take about the same time.

    The time of the slowest rank counts; the ranks compare the times of all calls when these are judged. `times_long`,
    on one rank alone: whether calls that take longer than `LONGEST` over the contexts are timed on one device, too.

    Attributes
    ----------
    state : State
    seconds : dict of Way to float
        The seconds of a call, once they are known: the same number on every rank.
    """

    def __init__(self, state: State, ranks: Communicator, times_long: bool = False) -> None:
        self.state, self._times_long = state, times_long
        self.seconds: dict[Way, float] = {}
        self._ranks = ranks
        self._timed: list[float] = []  # seconds of the calls of this rank that led to no state yet
        self._calls = self._next = 0

    @property
    def way(self) -> Way:
        """The Way to compute the next call."""
        return Way.SEVERAL if self.state in (State.TIMES_SEVERAL, State.SEVERAL) else Way.ONE

    @property
    def is_long(self) -> bool:
        """Return whether a call is known to take longer than `LONGEST` over the contexts."""
        return self.seconds.get(Way.SEVERAL, 0) > LONGEST

    def run(self, compute: Callable[[Way], tuple[Any, bool]]) -> Any:
        """Compute a call, and time it if the choice is open; return its results.

        ``compute(way)`` returns the results, and whether the call counts.
        """
        state, began = self.state, time.perf_counter()
        results, counts = compute(self.way)
        if counts and state is self.state and self._is_timed():
            self._add(time.perf_counter() - began)
        return results

    def _is_timed(self):
        """Return whether the call that has just been made is timed; a Chooser that rests counts it."""
        if self.state is State.RESTS:
            self._calls += 1
            return self._calls >= self._next
        return self.state not in (State.ONE, State.SEVERAL)

    def _add(self, seconds):
        self._timed.append(seconds)
        state = self._next_state()
        if state is not None:
            self._timed, self.state = [], state

    def rest(self) -> None:
        """Compute calls on one device until some take much longer than those that were timed."""
        self.seconds.pop(Way.SEVERAL, None)
        self.state, self._calls, self._next = State.RESTS, 0, 2 * (WARM_UP + COUNTED)

    def reason(self) -> str:
        """Return why the way was chosen, as a text for the user."""
        one = self.seconds[Way.ONE] * 1e3
        if Way.SEVERAL not in self.seconds:
            return 'a call takes %.2g ms, too short to divide' % one
        return '%.3g ms a call on one device, %.3g ms divided' % (one, self.seconds[Way.SEVERAL] * 1e3)

    def _next_state(self):
        """Return the State that the calls so far lead to; None while more are needed."""
        other = self.seconds.get(Way.ONE if self.way is Way.SEVERAL else Way.SEVERAL)
        if other is not None and len(self._timed) == WARM_UP:
            fastest = min(self._on_slowest()[1:])  # the first one compiles
            if fastest > other:
                self.seconds[self.way] = fastest
                return state_after(self.seconds, self._times_long)
        counted = self._timed[WARM_UP:]
        if len(counted) < COUNTED and not (self._times_long and sum(counted) >= PATIENCE):
            return None
        before = self.seconds.get(Way.ONE)
        self.seconds[self.way] = statistics.median(self._on_slowest()[WARM_UP:])
        if self.state is not State.RESTS:
            return state_after(self.seconds, self._times_long)
        if self.seconds[Way.ONE] > max(SHORTEST, GROWN * before):
            return State.TIMES_SEVERAL
        self.seconds[Way.ONE] = before
        self._next *= 2
        return State.RESTS

    def _on_slowest(self):
        """Return the seconds of each timed call on the rank on which it took longest."""
        nanoseconds = [round(seconds * 1e9) for seconds in self._timed]
        return (self._ranks.handshake((SHARE,), nanoseconds).max(axis=0) * 1e-9).tolist()


def state_after(seconds: Mapping[Way, float], times_long: bool = False) -> State:
    """Return the State after calls were timed, in one way or in both.

    >>> state_after({Way.ONE: 2e-3}).name, state_after({Way.ONE: 2e-3, Way.SEVERAL: 1e-3}).name
    ('TIMES_SEVERAL', 'SEVERAL')
    """
    if Way.SEVERAL not in seconds:
        return State.ONE if seconds[Way.ONE] < SHORTEST else State.TIMES_SEVERAL
    if Way.ONE not in seconds:
        return State.SEVERAL if seconds[Way.SEVERAL] > LONGEST and not times_long else State.TIMES_ONE
    return State.ONE if seconds[Way.SEVERAL] > seconds[Way.ONE] else State.SEVERAL


class LengthChooser:
    """The choice between one device and several for each batch, by its length.

    Lengths of as many binary digits share a Chooser. Its choice counts for shorter, or longer, batches, too.
    ``note_short(samples)`` is called when it is known that batches of fewer samples are faster on one device.
    """

    def __init__(self, ranks: Communicator, note_short: Callable[[int], object], times_long: bool = False) -> None:
        self._ranks, self._note_short, self._times_long = ranks, note_short, times_long
        self._choosers: dict[int, Chooser] = {}
        self._one, self._several = Chooser(State.ONE, ranks), Chooser(State.SEVERAL, ranks)
        self._one_below, self._several_from = 0, math.inf
        self._are_below_long = False  # the batches that made `_one_below` known

    def is_open(self, samples: int) -> bool:
        """Return whether the faster way is not known yet for a number of samples."""
        return self._one_below <= samples < self._several_from

    def is_long(self, samples: int) -> bool:
        """Return whether batches of a number of samples are known to be long, as for a Chooser."""
        if samples < self._one_below:
            return self._are_below_long
        return samples.bit_length() in self._choosers and self._choosers[samples.bit_length()].is_long

    def divide(self, samples: int) -> None:
        """Choose several contexts for batches of a number of samples, and for longer ones."""
        self._several_from = 1 << (samples.bit_length() - 1)
        self._one_below = min(self._one_below, self._several_from)

    def run(self, samples: int, compute: Callable[[Way], tuple[Any, bool]]) -> Any:
        """Compute a batch of a number of samples; see `Chooser.run`."""
        if samples < self._one_below:
            return self._one.run(compute)
        if samples >= self._several_from:
            return self._several.run(compute)
        digits = samples.bit_length()
        chooser = self._choosers.setdefault(digits, Chooser(State.TIMES_SEVERAL, self._ranks, self._times_long))
        results = chooser.run(compute)
        if chooser.state is State.ONE:
            self._one_below, self._are_below_long = 1 << digits, chooser.is_long
            self._note_short(self._one_below)
        elif chooser.state is State.SEVERAL:
            self._several_from = 1 << (digits - 1)
        return results
