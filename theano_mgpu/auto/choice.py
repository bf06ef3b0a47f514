"""The choice of the way to compute a call: calls are timed in each way, and the fastest way goes on."""
from __future__ import annotations

import enum
import functools
import math
import statistics
import time
from collections import defaultdict
from typing import Any, Callable, Iterable, Optional, Tuple

import theano

from ..comm.activities import SHARE
from ..comm.communicator import Communicator

WARM_UP = 3        # calls before those that count: kernels are built, buffers are allocated
COUNTED = 5        # calls that count, in each way
SHORTEST = 0.5e-3  # seconds; a call that takes less on the host stays there: a step over contexts costs about as much
LONGEST = 10e-3    # seconds; for a call that takes more over contexts, no function is compiled for the host
GROWN = 4          # times the seconds of a call on the host, after which the choice is made anew
PATIENCE = 2.0     # seconds of calls in one way, after which fewer than COUNTED do
STILL_TIMED = ', still being timed'  # for the user, of calls that are divided


class Way(enum.Enum):
    """A way to compute a call; its value is a word for the user."""

    HOST = 'host'        # Theano's own function
    DEVICE = 'whole'     # the whole batch, or a call without a batch, on the first context of this process
    SEVERAL = 'divided'  # a part of the batch on each context


def word(way: Way) -> str:
    """Return a word for a way, for the user: Theano's own functions run on the device of the flag ``device``."""
    return theano.config.device if way is Way.HOST and theano.config.device != 'cpu' else way.value


Compute = Callable[[Way], Tuple[Any, Optional[bool]]]


class Treatment(enum.Enum):
    """The treatment of the next call by a Chooser."""

    TIMES = 'is timed'
    SETTLED = 'is computed in the way that was chosen'
    RESTS = 'is computed on the host; ever fewer calls, which may have grown, are timed'


class Chooser:
    """The choice between ways, for calls that take about the same time.

    ``ways()`` yields those that there are, in the order in which they are timed; it is asked for one after the other,
    as each is needed. The time of the slowest rank counts; the ranks compare the times of all calls when these are
    judged. Before another way than the host is compiled, calls on the host take ``patience()`` seconds, unless they are
    too short to divide: so a short script is never twice as slow.

    Attributes
    ----------
    way : Way
        Of the next call.
    state : Treatment
    seconds : dict of Way to float
        The seconds of a call in each way that was timed: the same number on every rank.
    """

    def __init__(self, ways: Callable[[], Iterable[Way]], ranks: Communicator,
                 patience: Callable[[], float] = float) -> None:
        self.way, self.state = next(iter(ways())), Treatment.TIMES
        self.seconds: dict[Way, float] = {}
        self._ways, self._ranks, self._patience = ways, ranks, patience
        self._timed: list[float] = []  # seconds of calls of this rank in the present way, first and last ones
        self._spent = 0.0              # seconds of all of them
        self._left = 0                 # calls that were left to another way
        self._calls = self._next = 0   # calls since it rests, and the first one that is timed then

    def run(self, compute: Compute) -> Any:
        """Compute a call, and time it if the choice is open; return its results.

        ``compute(way)`` returns the results, and whether the call counts; None if it was left to another way.
        """
        way, began = self.way, time.perf_counter()
        results, counts = compute(way)
        if counts is None and way is self.way and self.state is Treatment.TIMES:
            self._left += 1
            if self._left == COUNTED and self.seconds:
                self._take(math.inf)
        elif counts and way is self.way and self._is_timed():
            self._timed.append(time.perf_counter() - began)
            self._spent += self._timed[-1]
            self._judge()
        return results

    def skip_quiet_calls(self) -> int:
        """Count the calls to come that are not timed as computed, of a Chooser that rests; return their number."""
        quiet = max(0, self._next - self._calls - 1)
        self._calls += quiet
        return quiet

    def leave(self, way: Way) -> None:
        """Choose among the other ways, since no call can be computed in this one."""
        self.seconds.pop(way, None)
        if way is self.way:
            self._timed, self._spent = [], 0.0
            self._go_on()

    def rest(self) -> None:
        """Compute calls on the host until some take much longer than those that were timed."""
        self.state, self._calls, self._next = Treatment.RESTS, 0, 2 * (WARM_UP + COUNTED)

    def reason(self, *further: str) -> str:
        """Return why the way was chosen, as a text for the user, maybe with further reasons."""
        others = ['%s %s' % ('one device' if way is Way.DEVICE else word(way), _milliseconds(seconds))
                  for way, seconds in self.seconds.items() if way is not self.way and seconds < math.inf]
        notes = '; '.join(filter(None, [', '.join(others), *further]))
        short = ', too short to divide' * (not others and self.way is Way.HOST and self._is_short())
        return '%s, %s%s%s' % (word(self.way), _milliseconds(self.seconds[self.way]), short, notes and ' (%s)' % notes)

    def _is_timed(self):
        """Return whether the call that has just been made is timed; a Chooser that rests counts it."""
        if self.state is Treatment.RESTS:
            self._calls += 1
            return self._calls >= self._next
        return self.state is Treatment.TIMES

    def _is_short(self):
        return self.seconds.get(Way.HOST, math.inf) < SHORTEST

    def _judge(self):
        """Take the seconds of a call in the present way, once enough calls were timed."""
        if len(self._timed) == WARM_UP and self.seconds and self.state is Treatment.TIMES:
            fastest = min(self._on_slowest()[1:])  # the first one compiles
            if fastest > min(self.seconds.values()):
                self._take(fastest)
                return
        del self._timed[WARM_UP:-COUNTED]
        counted = self._timed[WARM_UP:]
        if len(counted) == COUNTED or sum(counted) >= PATIENCE and self._ranks.size == 1:
            if self.way is not Way.HOST or self.seconds or statistics.median(counted) < SHORTEST or \
                    self._spent >= self._patience():
                self._take(statistics.median(self._on_slowest()[WARM_UP:]))

    def _take(self, seconds):
        """Note the seconds of a call in the present way, and go on."""
        self._timed, self._spent, self._left = [], 0.0, 0
        if self.state is Treatment.RESTS:
            if seconds <= max(SHORTEST, GROWN * self.seconds[Way.HOST]):
                self._next *= 2
                return
            self.seconds.clear()
        self.seconds[self.way], self.state = seconds, Treatment.TIMES
        self._go_on()

    def _go_on(self):
        """Choose the next way to time, if another one may be faster; else settle on the fastest."""
        is_long = min(self.seconds.values(), default=0) > LONGEST
        other = None if self._is_short() else next((way for way in self._ways() if way not in self.seconds and
                                                    not (is_long and way is Way.HOST)), None)
        self.state = Treatment.TIMES if other else Treatment.SETTLED
        self.way = other or min(self.seconds, key=self.seconds.__getitem__, default=Way.HOST)

    def _on_slowest(self):
        """Return the seconds of each timed call on the rank on which it took longest."""
        nanoseconds = [round(seconds * 1e9) for seconds in self._timed]
        return (self._ranks.handshake((SHARE,), nanoseconds).max(axis=0) * 1e-9).tolist()


def _milliseconds(seconds):
    return '%.3g ms' % (seconds * 1e3)


class LengthChooser:
    """The choice of the way for each batch, by its length.

    Lengths of as many binary digits share a Chooser. Its choice counts for shorter, or longer, batches, too. Batches of
    fewer samples than `whole_below` are known to be faster whole.
    """

    def __init__(self, ways: Callable[[], Iterable[Way]], ranks: Communicator,
                 patience: Callable[[], float] = float) -> None:
        self._choosers: dict[int, Chooser] = defaultdict(functools.partial(Chooser, ways, ranks, patience))
        self._whole: Chooser | None = None  # of batches that are so short that they stay whole
        self.whole_below, self._several_from = 0, math.inf

    def is_open(self, samples: int) -> bool:
        """Return whether the fastest way is not known yet for a number of samples."""
        return self.whole_below <= samples < self._several_from

    def settled(self, samples: int) -> Way | None:
        """Return the way of batches of a number of samples that stay whole for good; None for others."""
        return self._whole.way if samples < self.whole_below and self._whole is not None and \
            self._whole.state is Treatment.SETTLED else None

    def divide(self, samples: int) -> None:
        """Choose several contexts for batches of a number of samples, and for longer ones."""
        self._several_from = 1 << max(samples.bit_length() - 1, 0)
        self.whole_below = min(self.whole_below, self._several_from)

    def leave(self, way: Way) -> None:
        """Choose among the other ways, since no call can be computed in this one: ``ways()`` has it no more."""
        if way is Way.SEVERAL:
            self._several_from = math.inf
        for chooser in self._choosers.values():
            chooser.leave(way)

    def is_all_on_host(self) -> bool:
        """Return whether no call that has come so far is computed over contexts now."""
        return all(chooser.way is Way.HOST for chooser in self._choosers.values())

    def of_longest(self) -> Chooser | None:
        """Return the Chooser of the longest batches for which a way was chosen; None if there are none."""
        chosen = [digits for digits, each in self._choosers.items() if each.state is not Treatment.TIMES]
        return self._choosers[max(chosen)] if chosen else None

    def has_chosen(self) -> bool:
        """Return whether a way was chosen for batches of some length."""
        return self.of_longest() is not None or self._several_from < math.inf

    def reason(self, chooser: Chooser, *further: str) -> str:
        """Return why a Chooser has its way, see `Chooser.reason`, and how shorter batches are computed."""
        shorter = '; fewer than %d samples: %s' % (self.whole_below, word(self._whole.way)) \
            if chooser.way is Way.SEVERAL and self.whole_below and self._whole is not None else ''
        return chooser.reason(*further) + shorter

    def chooser(self, samples: int) -> Chooser:
        """Return the Chooser of batches of a number of samples."""
        if samples < self.whole_below and self._whole is not None:
            return self._whole
        return self._choosers[samples.bit_length()]

    def run(self, samples: int, compute: Compute) -> Any:
        """Compute a batch of a number of samples; see `Chooser.run`."""
        if samples >= self._several_from:
            return compute(Way.SEVERAL)[0]
        chooser = self.chooser(samples)
        results = chooser.run(compute)
        if chooser.state is Treatment.SETTLED:
            if chooser.way is Way.SEVERAL:
                self.divide(samples)
            elif samples >= self.whole_below:
                self._whole, self.whole_below = chooser, 1 << samples.bit_length()
        return results
