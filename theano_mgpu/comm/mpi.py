"""The communicator of an MPI job.

In a handshake a few integers go from each rank to each, so that all know that all do the same. A rank that does
something else, has failed, or does not come is found at once, or in time, and by name.
"""
from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from typing import Any, Sequence

import numpy as np

from ..errors import MgpuError, RankError
from ..options import present_flag
from ..utils import mpi_environment, rank_process
from . import alone, mpi_library
from .activities import ADD, COMPARE, COMPILE, END, FAILED, FEED, PATIENT, SHARE, SLOW, describe
from .collectives import all_gather_object
from .communicator import WIDTH, Communicator
from .host_sum import all_reduce as sum_of_buffers
from .mailbox import HANDSHAKE, PARTS, Mailbox
from .notice import notices
from .rank_errors import description, known_to_all, packed, unpacked
from .waiting import REMEDY, Watchdog, poll, unanswered

LONGEST = 1 << 30  # bytes in one message: MPI counts up to 2**31


def choose_ranks(name: str | None) -> Communicator:
    """Return the processes that a function runs over, for the name of an executor."""
    name = name or present_flag('mgpu.executor')
    together = name == 'mpi' or (name == 'auto' and mpi_environment.size() > 1)
    return mpi_communicator() if together and not mpi_environment.started_by_rank() else Communicator()


@functools.lru_cache(maxsize=None)
def mpi_communicator() -> MpiCommunicator:
    """Return the communicator of all processes of this job; the same object for every function."""
    rank_process.note_joined()
    ranks = MpiCommunicator(mpi_library.import_mpi())
    rank_process.report(mpi_environment.TOGETHER)
    return ranks


def _leave():
    """Make a fork of a rank a process alone, for whatever it inherits: the messages of the rank are not its own."""
    if mpi_communicator.cache_info().currsize:
        ranks: Any = mpi_communicator()
        atexit.unregister(ranks.end)
        ranks.__class__ = Communicator  # for each function that refers to it
        ranks.__init__()
        mpi_communicator.cache_clear()
    mpi_library.leave()


os.register_at_fork(after_in_child=_leave)


@atexit.register
def _end_apart():
    """End a rank that has exchanged nothing yet, and tell the others.

    Otherwise they would wait for its first message, and it for them in MPI.
    """
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi_communicator.cache_info().currsize or not mpi_environment.trains_together() \
            or sys.exc_info()[0] is not None or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() \
            or mpi.COMM_WORLD.size != mpi_environment.size():
        return
    _end_after_error()
    MpiCommunicator(mpi, is_ending=True).end()


def _end_after_error():
    """End all ranks if this one ends by an error that a hook of the script's own has shown."""
    if getattr(sys, 'last_type', None) is not None:
        rank_process.show_output()
        rank_process.abort(1)


class SingleThreadGuard:
    """A ``with`` block for one thread at a time, as often within another as it likes: an MgpuError for a second one."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if alone.is_alone():
            raise MgpuError('%s computes alone what a generator or Sequence calls, and this call needs all ranks: it '
                            'is of mgpu.function, a Predictor or a Checkpoint, or reads or sets a state divided among '
                            'the ranks (mgpu.update_on=sharded). Make it before the loop, or in a callback'
                            % self._ranks.name(self._ranks.rank))
        if not self._lock.acquire(blocking=False):
            raise MgpuError('two threads of %s use functions over the ranks of the job at the same time. Every rank '
                            'has to make the same calls in the same order: call such functions from one thread, or '
                            "keep them to this process by executor='serial'" % self._ranks.name(self._ranks.rank))

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


class MpiCommunicator(Communicator):
    """All processes of an MPI job, by mpi4py's module ``MPI``.

    A process that is ending only tells the others so, and waits for them as long as they take.

    After a handshake the ranks exchange values by collectives that block: Open MPI's non-blocking ones take 1.3 to 8
    times as long from 64 KB on. A watchdog looks after a rank that stops at that very moment.

    An array that one rank owns is a message of its own, from its present memory to new memory of another rank. On one
    host MPI copies it once where the system lets a process read another one's memory. Open MPI's collectives for parts
    of different lengths take twice as long, and need all arrays in one piece of memory before.
    """

    def __init__(self, mpi: Any, is_ending: bool = False) -> None:
        self._mpi, self._comm, self._is_ending = mpi, mpi.COMM_WORLD, is_ending
        super().__init__(self._comm.rank, self._comm.size, [''] * self._comm.size)
        self.hosts[self.rank] = rank_process.host()
        self.takes_threads = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self.single_thread = SingleThreadGuard(self)
        self.mailbox = Mailbox(mpi, self.single_thread)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._activity: Sequence[int] = (SHARE,)
        self._sent = np.zeros(3 + WIDTH + 2, 'int64')  # the activity, integers, a notice, changes of variables
        self._received = np.zeros((self.size, len(self._sent)), 'int64')
        self._senders = {rank: self._comm.Recv_init(self._received[rank], rank, HANDSHAKE) for rank in self._others}
        self._requests = [self._comm.Send_init(self._sent, rank, HANDSHAKE) for rank in self._others]
        self._requests += self._senders.values()
        # Python 3.12 starts no thread while it ends.
        self._watchdog = contextlib.nullcontext if is_ending else Watchdog(self._abort)
        self.hosts = all_gather_object(self, rank_process.host())
        if not is_ending:
            atexit.register(self.end)

    # ------------------------------------------------------------------------------------------------- handshakes

    def handshake(self, activity: Sequence[int], integers: Sequence[int] = ()) -> np.ndarray:
        with self.single_thread:
            self._send_to_each(activity, integers)
            if (self._received[:, :3] != self._sent[:3]).any():
                if (self._received[:, 0] == FAILED).any():
                    raise self._error_of_first(None)
                self._raise_difference()
            self._activity = activity
            return self._received[:, 3:3 + len(integers)].copy()

    def announce_failure(self, error: BaseException, of_step: bool) -> BaseException:
        with self.single_thread:
            self._send_to_each((FAILED, of_step))
            return self._error_of_first(error)

    def _send_to_each(self, activity, integers=()):
        """Send this rank's integers, and wait for the integers of the others."""
        self.n_handshakes += 1
        if self.lost:
            raise RankError('this process has lost the other ranks of its job (%s). End it, and start the job '
                            'again from its last checkpoint' % self.lost)
        self._sent[:] = 0
        self._sent[:len(activity)] = activity
        self._sent[3:3 + len(integers)] = integers
        self._sent[-2:] = notices.received, alone.n_changes
        self._received[self.rank] = self._sent
        self._mpi.Prequest.Startall(self._requests)
        self._wait(activity)
        self._notice, self.n_changes = int(self._received[:, -2].max()), int(self._received[:, -1].sum())

    def _wait(self, activity):
        """Wait for the integers of the others; after an error their messages are left over, and the ranks are lost."""
        reported = 0.0
        try:
            for waited in poll(functools.partial(self._mpi.Request.Testall, self._requests)):
                limit = present_flag('mgpu.timeout')
                if limit and waited - reported > limit:
                    reported = waited
                    self._tell_who_is_missing(activity, waited, limit * (PATIENT if activity[0] in SLOW else 1))
        except BaseException as error:
            self.lost = self.lost or str(error) or type(error).__name__
            raise

    def _tell_who_is_missing(self, activity, waited, limit):
        """Say which ranks have not come, or raise a RankError if they have had time enough."""
        missing = [rank for rank, request in self._senders.items() if not request.Get_status()]
        if self._is_ending or not missing or activity[0] == END and missing == [0]:
            return  # all have come by now; or a script acts on rank 0 alone, once all is trained, for any time
        text = '%s, %s, has waited %.0f s for %s' % (self.name(self.rank), describe(activity, self.functions), waited,
                                                     ', '.join(map(self.name, missing)))
        if waited < limit or activity[0] == FEED and missing == [0]:  # whose data may come slowly
            rank_process.say(text + ', and goes on waiting')
            return
        text += ', which did not come'
        self.lost = text
        raise unanswered(text)

    def _raise_difference(self):
        """Raise a RankError that says which rank does what."""
        doing = ['%s: %s' % (self.name(rank), describe(row[:3], self.functions))
                 for rank, row in enumerate(self._received)]
        ended = [self.name(rank) for rank, row in enumerate(self._received) if row[0] == END]
        if ended:
            raise RankError('%s ended while others go on (%s). Every rank has to make the same calls: look for an '
                            'exit on some ranks only; where each feeds its own data, call join() once they end'
                            % (', '.join(ended), '; '.join(doing)))
        raise RankError('the ranks do different things. %s. Every rank has to make the same calls in the same order, '
                        'from one thread: do on one rank (mgpu.rank() == 0) only what calls no function over several '
                        'contexts' % '; '.join(doing))

    def _error_of_first(self, error):
        """Return the error of the first rank that has failed, after a handshake; `error` is this rank's own."""
        self.n_failures += 1
        first = int(np.flatnonzero(self._received[:, 0] == FAILED)[0])
        with self._watchdog((FAILED,)):
            package = self._comm.bcast(packed(error) if first == self.rank else None, first)
        if first != self.rank and (error is None or description(error) != package[:2]):
            where = {COMPILE: 'to compile this function, which was therefore given up on every rank',
                     COMPARE: 'in one of the last batches. Each rank computes them whole, and this one has done so'}
            error = unpacked(package, '%s failed %s' % (
                self.name(first), where.get(self._sent[0], 'here, which was therefore given up on every rank')))
        return known_to_all(error, bool(self._received[first, 1]))

    # ------------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            total = array.astype('float32') if array.dtype == 'float16' else array  # MPI has no float16
            with self._watchdog((ADD,)):
                self._comm.Allreduce(self._mpi.IN_PLACE, total)
            if total is not array:
                array[...] = total

    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        received = {i: [np.empty(array.shape, array.dtype) for _ in self._others]
                    for i, (array, owner) in enumerate(zip(arrays, owners)) if owner == self.rank}
        self._exchange((ADD,), [(array, owner) for array, owner in zip(arrays, owners) if owner != self.rank],
                       [part for parts in received.values() for part in zip(parts, self._others)])
        return [_sum(array, received[i]) if i in received else None for i, array in enumerate(arrays)]

    def all_gather(self, rows: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> None:
        # MPI counts no more than 2**31 of a type.
        row = self._mpi.BYTE.Create_contiguous(out[:1].nbytes).Commit()
        with self._watchdog(self._activity):
            self._comm.Allgatherv([rows.reshape(-1).view('uint8'), lengths[self.rank], row],
                                  [out.reshape(-1).view('uint8'), lengths, None, row])
        row.Free()

    def all_gather_owned(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        gathered = [None if owner == self.rank else np.empty(array.shape, array.dtype)
                    for array, owner in zip(arrays, owners)]
        self._exchange(self._activity, [(array, rank) for array, owner in zip(arrays, owners)
                                        for rank in self._others if owner == self.rank],
                       [(array, owner) for array, owner in zip(gathered, owners) if owner != self.rank])
        return gathered

    def all_to_all(self, messages: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        received = [messages[self.rank] if rank == self.rank else np.empty(length, messages[0].dtype)
                    for rank, length in enumerate(lengths)]
        self._exchange(self._activity, *([(every[rank], rank) for rank in self._others]
                                         for every in (messages, received)))
        return received

    def _exchange(self, activity, sent, received):
        """Send arrays to ranks, and receive others from ranks, each pair of ranks in the order of its arrays."""
        with self._watchdog(activity):
            requests = [self._comm.Isend(_integers_of(np.ascontiguousarray(array)), rank, PARTS)
                        for array, rank in sent]
            self._mpi.Request.Waitall(requests + [self._comm.Irecv(_integers_of(array), rank, PARTS)
                                                  for array, rank in received])

    def broadcast(self, arrays: Sequence[np.ndarray], root: int = 0) -> None:
        with self._watchdog(self._activity):
            for array in arrays:
                flat = array.reshape(-1).view('uint8')
                for start in range(0, flat.size, LONGEST):
                    self._comm.Bcast([flat[start:start + LONGEST], self._mpi.BYTE], root)

    # ---------------------------------------------------------------------------------------- the end of a process

    def _abort(self, activity, waited):
        """End the job: called by the watchdog."""
        rank_process.show_output()
        others = ' or '.join(map(self.name, self._others))
        rank_process.say('%s, %s, has waited %.0f s for data from %s, and ends the job; %s'
                         % (self.name(self.rank), describe(activity, self.functions), waited, others, REMEDY))
        rank_process.abort(1)

    def end(self) -> None:
        """Leave the job when the script ends; ranks that have not ended learn of it, and so does this one."""
        if sys.exc_info()[0] is not None:
            return
        _end_after_error()
        try:
            if not self.lost:
                self.handshake((END,))
                rank_process.report(mpi_environment.END)
        except Exception:  # a RankError, or the error of a rank that has failed
            rank_process.show_output()
            if not self.lost:
                time.sleep(60)  # the other ranks end the job
        if self.lost:
            rank_process.say('%s ends the job, since it has lost the other ranks (%s)'
                             % (self.name(self.rank), self.lost))
            rank_process.abort(1)
        # Here, since nothing can look after it once Python has ended; by C, since it keeps Python's lock.
        rank_process.exit_after(present_flag('mgpu.timeout'))
        for request in self._requests:
            request.Free()
        self._mpi.Finalize()


def _sum(own, received):
    """Return the sum of an array and its parts from other ranks, in the memory of the first of these."""
    if not received:
        return own
    sum_of_buffers([received[0], own, *received[1:]], received[0])
    return received[0]


def _integers_of(array):
    """Return the memory of a contiguous array as integers: MPI has no float16, and counts no more than 2**31 bytes."""
    return array.reshape(-1).view('int%d' % (8 * min(array.itemsize, 8)))
