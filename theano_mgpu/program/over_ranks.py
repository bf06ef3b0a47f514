"""Sums over the ranks: after each other, or each while the next piece of the backward pass is computed."""
import threading
from typing import Dict, Sequence

from ..distributed.activities import ADD
from ..distributed.communicator import Communicator
from ..profiling.timeline import Timings, span
from ..utils.worker_threads import Task, WorkerThreads
from .exchange import Sums


class OverRanks:
    """Adds Sums over the ranks, in place; those of an idle rank, which has no samples, are 0.

    A ``with`` block waits at its end for what is under way.

    Parameters
    ----------
    ranks : Communicator
    timings : Timings
    overlaps : bool
        Whether `start` adds on a thread of its own. The ranks meet before in the thread that calls, so an error on one
        of them is found as in a step without overlap.
    """

    def __init__(self, ranks: Communicator, timings: Timings, overlaps: bool):
        self._ranks, self._timings = ranks, timings
        self._thread = None
        if overlaps and ranks.size > 1:
            self._thread = WorkerThreads([_add], 'theano_mgpu exchange')
        self._underway: Dict[Sums, Task] = {}  # in the block; those of a later boundary may be added early

    def __enter__(self):
        self._wait()  # a second Ctrl-C may have ended the wait of the last block
        return self

    def __exit__(self, *error):
        self._wait()  # also after an error: the other ranks add, too

    def _wait(self):
        if self._underway:
            self._thread.finish(self._underway.values())
            self._underway = {}

    def start(self, sums: Sums, idle: bool) -> None:
        """Begin to add, if there is a thread for it."""
        if self._thread is None:
            return
        self._meet([sums], idle)
        begun, busy = threading.Lock(), any(not each.done() for each in self._underway.values())
        begun.acquire()
        self._underway[sums] = task = Task(sums, self._ranks, begun)
        self._thread.submit(task)
        if not busy:
            begun.acquire()  # Theano's compiled code keeps Python's lock: without this, the thread would start after it

    def finish(self, every_sums: Sequence[Sums], idle: bool) -> None:
        """Have all of these added when it returns, and none under way: ranks have to exchange values in one order."""
        if self._ranks.size == 1:
            return
        with self._timings.span('exchange'):
            for each in self._underway.values():
                each.result()
        rest = [sums for sums in every_sums if sums not in self._underway]
        if rest:
            self._meet(rest, idle)
            with self._timings.span('exchange'):
                for sums in rest:
                    sums.add_over(self._ranks)

    def _meet(self, every_sums, idle):
        for sums in every_sums if idle else ():
            sums.clear()
        with self._timings.span('wait'):
            self._ranks.handshake((ADD,))


def _add(sums, ranks, begun):
    begun.release()
    with span('exchange', 'exchange'):
        sums.add_over(ranks)
