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
LONGEST = 10e-3    # seconds; a call that takes more over contexts stays there, and no function for one device is made
GROWN = 4          # times the seconds of a call on one device, after which the choice is made anew
MARGIN = 1.1       # one device is said to be faster if several take longer by this factor; less is noise
PATIENCE = 2.0     # seconds on one device, after which fewer calls than COUNTED do for a trial


class Way(enum.Enum):
    """A way to compute a call."""

    ONE = 'one device'
    SEVERAL = 'several contexts'


class State(enum.Enum):
    """The treatment of the next call by a Chooser."""

    TIMES_ONE = 'computes it on one device, and times it'
    TIMES_SEVERAL = 'computes it over the contexts, and times it'
    TIMES_BOTH = 'computes it over the contexts and on one device, and times both'
    ONE = 'computes it on one device'
    SEVERAL = 'computes it over the contexts'
    RESTS = 'computes it on one device, and times ever fewer calls, which may have grown'


OVER_CONTEXTS = State.TIMES_SEVERAL, State.TIMES_BOTH, State.SEVERAL


class Chooser:
    """The choice between one device and several, for calls that take about the same time.

    Parameters
    ----------
    state : State
        The first one.
    ranks : Communicator
        The processes that make the same calls. The time of the slowest one counts.
    together : bool
        Whether every rank makes every timed call, so that they compare its time at once. Else they compare the times of
        all calls when these are judged.

    Attributes
    ----------
    state : State
    seconds : dict of Way to float
        The seconds of a call, once they are known: the same number on every rank.
    """

    def __init__(self, state: State, ranks: Communicator, together: bool = False) -> None:
        self.state = state
        self.seconds: dict[Way, float] = {}
        self._ranks, self._together = ranks, together
        self._timings: dict[Way, Timing] = {}
        self._calls = self._next = 0

    @property
    def way(self) -> Way:
        """The Way to compute the next call."""
        return Way.SEVERAL if self.state in OVER_CONTEXTS else Way.ONE

    def run(self, compute: Callable[[Way], tuple[Any, bool]]) -> Any:
        """Compute a call, and time it if the choice is open.

        Parameters
        ----------
        compute : callable
            ``compute(way)`` returns the results, and whether the call counts.

        Returns
        -------
        object
            The results.
        """
        state, began = self.state, time.perf_counter()
        results, counts = compute(self.way)
        if counts and state is self.state and self._is_timed():
            self.add({self.way: time.perf_counter() - began})
        return results

    def _is_timed(self):
        """Return whether the call that has just been made is timed; a Chooser that rests counts it."""
        if self.state is State.RESTS:
            self._calls += 1
            return self._calls >= self._next
        return self.state not in (State.ONE, State.SEVERAL)

    def add(self, seconds: Mapping[Way, float]) -> None:
        """Add the seconds of a call, and go on to the state that the calls so far lead to."""
        for way, each in seconds.items():
            self._timing(way).add(each)
        state = self._next_state([self._timing(way) for way in seconds])
        if state is not None:
            self._timings.clear()
            self.state = state

    def settle(self, way: Way) -> None:
        """Compute all calls in one way from now on."""
        self.state = State.SEVERAL if way is Way.SEVERAL else State.ONE

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

    def _timing(self, way):
        if way not in self._timings:
            # A trial begins once the steps over the contexts are warm.
            is_trial = self.state is State.TIMES_BOTH
            self._timings[way] = Timing(self._ranks, self._together, 0 if is_trial else WARM_UP,
                                        PATIENCE if is_trial and way is Way.ONE else math.inf)
        return self._timings[way]

    def _next_state(self, timings):
        """Return the State that the calls so far lead to; None while more are needed."""
        other = self.seconds.get(Way.ONE if self.way is Way.SEVERAL else Way.SEVERAL)
        if other is not None and timings[0].is_slower_than(other):
            self.seconds[self.way] = timings[0].fastest()
            return state_after(self.seconds)
        if not any(timing.is_complete() for timing in timings):
            return None
        before = self.seconds.get(Way.ONE)
        self.seconds.update((way, timing.seconds()) for way, timing in self._timings.items())
        if self.state is not State.RESTS:
            return state_after(self.seconds, MARGIN if self.state is State.TIMES_BOTH else 1)
        if self.seconds[Way.ONE] > max(SHORTEST, GROWN * before):
            return State.TIMES_SEVERAL
        self.seconds[Way.ONE] = before
        self._next *= 2
        return State.RESTS


def state_after(seconds: Mapping[Way, float], margin: float = 1) -> State:
    """Return the State after calls were timed in one way or in both.

    Parameters
    ----------
    seconds : dict of Way to float
        The seconds of a call.
    margin : float
        One device is faster if several take longer by this factor.

    Examples
    --------
    >>> state_after({Way.ONE: 2e-3}).name, state_after({Way.ONE: 2e-3, Way.SEVERAL: 1e-3}).name
    ('TIMES_SEVERAL', 'SEVERAL')
    """
    if Way.SEVERAL not in seconds:
        return State.ONE if seconds[Way.ONE] < SHORTEST else State.TIMES_SEVERAL
    if Way.ONE not in seconds:
        return State.SEVERAL if seconds[Way.SEVERAL] > LONGEST else State.TIMES_ONE
    return State.ONE if seconds[Way.SEVERAL] > margin * seconds[Way.ONE] else State.SEVERAL


class Timing:
    """The seconds of calls in one way, on the slowest rank.

    Parameters
    ----------
    ranks : Communicator
    together : bool
        Whether the ranks compare the time of each call at once, see `Chooser`.
    warm_up : int
        Calls before those that count.
    patience : float
        Seconds of all calls that count, after which fewer than `COUNTED` do.
    """

    def __init__(self, ranks: Communicator, together: bool, warm_up: int, patience: float) -> None:
        self._ranks, self._together, self._warm_up, self._patience = ranks, together, warm_up, patience
        self._own: list[float] = []
        self._agreed: list[float] = []

    def add(self, seconds: float) -> None:
        """Add the seconds of a call on this rank."""
        self._own.append(seconds)
        if self._together:
            self._agree()

    def is_slower_than(self, seconds: float) -> bool:
        """Return whether the warm-up is over, and all its calls but the first one, which compiles, took longer."""
        return len(self._own) + len(self._agreed) == self._warm_up and self.fastest() > seconds

    def fastest(self) -> float:
        """Return the seconds of the fastest call, without the first one."""
        return min(self._agree()[1:])

    def is_complete(self) -> bool:
        """Return whether enough calls were made."""
        times = (self._agreed + self._own)[self._warm_up:]
        return len(times) == COUNTED or sum(times) >= self._patience

    def seconds(self) -> float:
        """Return the median of the calls that count."""
        return statistics.median(self._agree()[self._warm_up:])

    def _agree(self):
        """Return the seconds of all calls, as all ranks know them; ranks compare those that are new."""
        if self._own:
            nanoseconds = [round(seconds * 1e9) for seconds in self._own]
            slowest = self._ranks.handshake((SHARE,), nanoseconds).max(axis=0)
            self._agreed += (slowest * 1e-9).tolist()
            self._own = []
        return self._agreed


class LengthChooser:
    """The choice between one device and several for each batch, by its length.

    Lengths of as many binary digits share a Chooser. Its choice counts for shorter, or longer, batches, too.

    Parameters
    ----------
    ranks : Communicator
        The processes that compute the same batches.
    note_short : callable
        ``note_short(samples)`` is called when it is known that batches of fewer samples are faster on one device.
    """

    def __init__(self, ranks: Communicator, note_short: Callable[[int], object]) -> None:
        self._ranks, self._note_short = ranks, note_short
        self._choosers: dict[int, Chooser] = {}
        self._one, self._several = Chooser(State.ONE, ranks), Chooser(State.SEVERAL, ranks)
        self._one_below, self._several_from = 0, math.inf

    def is_open(self, samples: int) -> bool:
        """Return whether the faster way is not known yet for a number of samples."""
        return self._one_below <= samples < self._several_from

    def run(self, samples: int, compute: Callable[[Way], tuple[Any, bool]]) -> Any:
        """Compute a batch of a number of samples; see `Chooser.run`."""
        if samples < self._one_below:
            return self._one.run(compute)
        if samples >= self._several_from:
            return self._several.run(compute)
        digits = samples.bit_length()
        chooser = self._choosers.setdefault(digits, Chooser(State.TIMES_SEVERAL, self._ranks, together=True))
        results = chooser.run(compute)
        if chooser.state is State.ONE:
            self._one_below = 1 << digits
            self._note_short(self._one_below)
        elif chooser.state is State.SEVERAL:
            self._several_from = 1 << (digits - 1)
        return results
