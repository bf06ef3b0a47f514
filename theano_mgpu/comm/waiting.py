"""The waiting of a rank for others: cheap, and not for ever."""
from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Iterator, Sequence

from ..errors import RankError
from ..options import present_flag

SPIN = 0.002  # seconds of waiting before a rank begins to sleep in between
NAP = 0.005   # the longest of these sleeps
LOOK = 0.05   # seconds from one look at the limit to the next
REMEDY = 'a longer time to wait is set by the flag mgpu.timeout, in seconds (0: for ever)'


def poll(done: Callable[[], bool]) -> Iterator[float]:
    """Wait until ``done()`` is true; yield the seconds that were waited so far, now and then.

    A time in which this process itself was stopped does not count: a job that was suspended as a whole and is resumed
    finds no rank missing.
    """
    waited = looked = 0.0
    last = time.monotonic()
    while not done():
        os.sched_yield()  # where there are more ranks than cores, another one may need this
        if waited > SPIN:
            time.sleep(min(NAP, waited / 50))
        now = time.monotonic()
        waited, last = waited + min(now - last, LOOK), now
        if waited - looked > LOOK:
            looked = waited
            yield waited


def unanswered(text: str) -> RankError:
    """Return the error to raise where a rank does not answer, for a text that names the rank."""
    return RankError('%s. Look at what it does; %s' % (text, REMEDY))


class Watchdog:
    """A thread that looks after a wait inside MPI, where no Python code can end it.

    It calls `expired` with the activity of a ``with`` block, and the seconds, once the block has lasted longer than the
    flag ``mgpu.timeout`` says.
    """

    def __init__(self, expired: Callable[[Sequence[int], float], None]) -> None:
        self._expired = expired
        self._activity: Sequence[int] = ()
        self._block: list[Sequence[int]] | None = None  # each ``with`` block makes a new list, which identifies it
        threading.Thread(target=self._look, name='theano_mgpu watchdog', daemon=True).start()

    def __call__(self, activity: Sequence[int]) -> Watchdog:
        """Return a context manager for a ``with`` block that is looked after."""
        self._activity = activity
        return self

    def __enter__(self) -> None:
        self._block = [self._activity]

    def __exit__(self, *error: Any) -> None:
        self._block = None

    def _look(self):
        seen, waited = None, 0.0
        while True:
            time.sleep(LOOK)
            block = self._block
            waited = waited + LOOK if block is not None and block is seen else 0.0
            seen = block
            if block and present_flag('mgpu.timeout') and waited > present_flag('mgpu.timeout'):
                self._expired(block[0], waited)
