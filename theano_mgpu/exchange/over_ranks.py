"""The addition of sums over the ranks: in order, or while the next part of a stage is computed."""
from __future__ import annotations

import threading
import time
from typing import Sequence

from ..comm.activities import ADD
from ..comm.communicator import Communicator
from ..utils.timeline import HOST, Timings, note, span
from ..utils.worker_threads import Task, WorkerThreads
from .host import HostChannel
from .nccl_channel import NcclChannel


class OverRanks:
    """The addition of sums over the ranks, in place: in order, or each while the next part of a stage is computed.

    If it `overlaps`, `start` adds on a thread of its own, or has devices add, after a handshake in the thread that
    calls. So an error of one rank is found as in a step without overlap.
    """

    def __init__(self, ranks: Communicator, timings: Timings, overlaps: bool):
        self._ranks, self._timings = ranks, timings
        self.overlaps = overlaps and ranks.size > 1
        self._threads = WorkerThreads([_add_over] * self.overlaps, 'theano_mgpu exchange')
        # Sums of a later boundary may be among them. Devices add without a task.
        self.underway: dict[HostChannel | NcclChannel, Task | None] = {}
        self.seconds = 0.0  # in which a rank has added in order

    def wait(self) -> None:
        """Wait for the sums under way; also after an error, since the other ranks add, too."""
        self._threads.finish(filter(None, self.underway.values()))
        self.underway = {}

    def start(self, sums: HostChannel | NcclChannel) -> None:
        """Begin to add on the thread for it, or on the devices."""
        self._meet()
        if not sums.by_host:
            sums.add_over()
            self.underway[sums] = None
            return
        begun, busy = threading.Lock(), any(not each.done() for each in filter(None, self.underway.values()))
        begun.acquire()
        self.underway[sums] = task = Task(sums, begun)
        self._threads.submit(task)
        if not busy:
            begun.acquire()  # Theano's compiled code keeps Python's lock: without this, the thread would start after it

    def finish(self, every_sums: Sequence[HostChannel | NcclChannel]) -> None:
        """Add the rest of these sums, and end those under way: ranks have to exchange values in one order."""
        if self._ranks.size == 1:
            return
        with self._timings.span('exchange'):
            for each in filter(None, self.underway.values()):
                each.result()
        rest = [sums for sums in every_sums if sums not in self.underway]
        if rest:
            self._meet()
            began = time.perf_counter()
            for sums in rest:
                sums.add_over()
            note(self._timings.seconds, 'exchange', HOST, began)
            self.seconds += time.perf_counter() - began

    def _meet(self):
        with self._timings.span('wait'):
            self._ranks.handshake((ADD,))


def _add_over(sums, begun):
    begun.release()
    with span('exchange', 'exchange'):
        sums.add_over()
