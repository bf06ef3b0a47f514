"""Several processes: the ranks of an MPI job. Each runs its own tasks; here is how they add, and share what they have.

Every rank makes the same calls in the same order. Before they exchange data they meet, see `meeting`.
"""
import atexit
import contextlib
import functools
import sys
import time

import numpy as np
from theano import config

from ..errors import BatchError, MgpuError, RankError
from ..jobs import mpi_environment, mpi_library, rank_process
from .failures import packed, unpacked
from .half_precision import add_in_half
from .meeting import MAIL, SENT, TAG, WRITTEN, Meeting
from .messages import LONGEST, as_bytes, bytes_of, from_bytes, split, summable
from .owned_parts import OwnedParts
from .process_group import ADD, COMPILE, END, FEED, GATHER, SHARE, WIDTH
from .waiting import REMEDY, Watchdog, poll

HOST = 64                # bytes of a host's name: Linux allows no more


@functools.lru_cache(maxsize=None)
def mpi_ranks():
    """The ranks of this job; the same object for every function."""
    rank_process.note_joined()
    return MpiRanks(import_mpi())


def import_mpi():
    """mpi4py's MPI, initialised.

    Raises
    ------
    MgpuError
        If mpi4py or MPI's library is missing, or MPI does not find the processes that the launcher has started.
    """
    try:
        mpi = mpi_library.started()
    except (ImportError, RuntimeError) as error:
        raise MgpuError(mpi_library.missing(error)) from error
    if mpi.COMM_WORLD.size != mpi_environment.size():
        raise MgpuError(mpi_library.mismatch(mpi.Get_library_version(), mpi.COMM_WORLD.size))
    return mpi


class MpiRanks(Meeting):
    """All processes of an MPI job.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.

    Notes
    -----
    What the ranks exchange once they have met goes by collectives that block: Open MPI's non-blocking ones take 1.3 to
    8 times as long from 64 KB on. A rank that stops at that very moment is left to a watchdog.
    """

    def __init__(self, mpi):
        super().__init__(mpi)
        self._unsent, self._incoming = [], {}  # the latter by tag
        self._watchdog = Watchdog(self._abort)
        self.meet((SHARE,))  # which waits for longer than a gather does: ranks do not start all at once
        own = np.frombuffer(rank_process.host().encode()[:HOST].ljust(HOST), 'uint8')
        names = self.all_gather(own.reshape(1, -1), [1] * self.size)
        self.hosts = {rank: name.tobytes().decode().rstrip() for rank, name in enumerate(names)}
        self.on_one_host = len(set(self.hosts.values())) == 1
        self._owned = OwnedParts(mpi)
        atexit.register(self._end)

    def check_threads(self):
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise MgpuError('mgpu.overlap=True exchanges gradients on a thread of its own, and MPI was started without '
                            'MPI_THREAD_MULTIPLE, which this needs. Leave out mpi4py.rc.thread_level and '
                            'mpi4py.rc.threads, or set mgpu.overlap=False')

    @contextlib.contextmanager
    def _exchange(self, what, values=()):
        """A ``with`` block for a collective that begins once all ranks are there; gives the integers of each."""
        with self.one_thread():
            found = self.meet(what, values)
            with self._watchdog(what):
                yield found

    def all_reduce(self, arrays):
        for array in arrays:
            total = summable(array)
            with self._watchdog((ADD,)):
                self._comm.Allreduce(self._mpi.IN_PLACE, total)
            if total is not array:
                array[...] = total

    def reduce_scatter(self, arrays, owners):
        with self._watchdog((ADD,)):
            return self._owned.add(arrays, owners)

    def all_reduce_in_half(self, arrays):
        kind = self._mpi.INT16_T

        def to_each(messages, lengths):
            received = np.empty(sum(lengths), 'int16')
            self._comm.Alltoallv([np.concatenate(messages), [message.size for message in messages], None, kind],
                                 [received, lengths, None, kind])
            return split(received, lengths)

        def to_all(message, lengths):
            received = np.empty(sum(lengths), 'int16')
            self._comm.Allgatherv([message, kind], [received, lengths, None, kind])
            return split(received, lengths)
        with self._watchdog((ADD,)):
            add_in_half(arrays, self.size, to_each, to_all, self.rank)

    def all_gather(self, rows, lengths):
        mine = np.ascontiguousarray(rows[:lengths[self.rank]])
        whole = np.empty((sum(lengths),) + rows.shape[1:], rows.dtype)  # before the others rely on this rank
        with self._exchange((GATHER,), [rows.ndim - 1] + list(rows.shape[1:]) + [0] * (WIDTH - rows.ndim)) as found:
            shapes = {tuple(row[1:1 + row[0]]) for row, length in zip(found, lengths) if length}
            if len(shapes) > 1:
                raise BatchError('the rows that the ranks have of one output have different shapes, %s, and cannot be '
                                 'put together: reduce this output, or pad its rows to one shape'
                                 % ' and '.join(map(str, sorted(shapes))))
            if shapes and shapes != {rows.shape[1:]}:  # those of a rank without samples mean nothing
                whole = np.empty((sum(lengths),) + shapes.pop(), rows.dtype)
            row = self._mpi.BYTE.Create_contiguous(whole[:1].nbytes).Commit()  # MPI counts no more than 2**31 of a type
            self._comm.Allgatherv([bytes_of(mine), lengths[self.rank], row], [bytes_of(whole), lengths, None, row])
            row.Free()
        return whole

    def all_gather_owned(self, arrays, owners):
        with self._exchange((GATHER,)):
            return self._owned.gather(arrays, owners)

    def broadcast(self, values):
        with self._exchange((SHARE,)):
            return [self._broadcast(value) for value in values]

    def _broadcast(self, value):
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return self._comm.bcast(value, 0)
        value = np.array(value, order='C')
        self._broadcast_bytes(bytes_of(value))
        return value

    def _broadcast_bytes(self, flat):
        for start in range(0, flat.size, LONGEST):
            self._comm.Bcast([flat[start:start + LONGEST], self._mpi.BYTE], 0)

    def broadcast_object(self, value, root=0):
        with self._exchange((SHARE,)):
            return self._comm.bcast(value, root)

    def broadcast_arrays(self, value=None):
        parts = []
        if self.rank == 0:
            parts = as_bytes(value, WIDTH)
        with self._exchange((FEED,), [len(part) for part in parts] + [0] * (WIDTH - len(parts))) as found:
            lengths = np.trim_zeros(found[0], 'b').tolist()
            parts = parts or [np.empty(length, 'uint8') for length in lengths]
            for part in parts:
                self._broadcast_bytes(part)
        return value if self.rank == 0 else from_bytes(parts)

    def gather_object(self, value):
        with self._exchange((SHARE,)):
            return self._comm.gather(value, 0)

    def post(self, rank, message, tag=MAIL):
        """Send a picklable message to a rank, without waiting for it to be taken."""
        with self.one_thread():
            self._unsent = [request for request in self._unsent if not request.Test()]
            self._unsent.append(self._comm.isend(message, rank, tag))

    def take(self, tag=MAIL):
        """The next message that was posted to this rank: ``(rank, message)``, or None if none has come yet."""
        with self.one_thread():
            if tag not in self._incoming:
                status = self._mpi.Status()
                found = self._comm.improbe(tag=tag, status=status)
                if found is None:
                    return None
                self._incoming[tag] = status.source, found.irecv()
            source, request = self._incoming[tag]
            came, message = request.test()
            if not came:
                return None
            del self._incoming[tag]
            return source, message

    def sent_by_first(self, act):
        if self.rank == 0:
            return self._act_and_post(act, None, SENT)
        found = self._posted_by_first(None, SENT, 'send a value')
        if found is None:
            self.meet((FEED,))  # rank 0 does something else: an error
        return found[0]

    def _act_and_post(self, act, what, tag):
        """Act on rank 0, and send the other ranks the result, or the error."""
        result = package = None
        try:
            result = act()
        except BaseException as error:
            package = packed(error)
            error.known_to_all, error.of_step = True, False
            raise
        finally:
            for rank in range(1, self.size):
                self.post(rank, (what, self._meetings, result, package), tag)
        return result

    def write_by_first(self, path, write):
        self.whole()
        if self.rank == 0:
            self._act_and_post(write, path, WRITTEN)
        elif self._posted_by_first(path, WRITTEN, 'write %s' % path) is None:
            write()

    def _posted_by_first(self, what, tag, deed):
        """Wait for rank 0's result, and return it in a tuple; None if rank 0 has gone on without it."""
        for waited in poll(lambda: False):
            # Rank 0's messages come in the order in which it sent them: once it is at the next meeting, what it has
            # not written here before it will not write.
            gone_on = self._comm.iprobe(0, TAG)
            found = self.take(tag)
            if found:
                sent, meetings, result, package = found[1]
                if (sent, meetings) == (what, self._meetings):
                    if package is not None:
                        error = unpacked(package, '%s failed to %s' % (self.name(0), deed))
                        error.known_to_all, error.of_step = True, False
                        raise error
                    return (result,)
            elif gone_on:
                return None
            elif config.mgpu.timeout and waited > config.mgpu.timeout:
                raise RankError('%s has waited %.0f s for %s to %s. Make the call on every rank, or on rank 0 '
                                'alone; %s' % (self.name(self.rank), waited, self.name(0), deed, REMEDY))

    @contextlib.contextmanager
    def first_compiler(self):
        """Local rank 0 compiles first: Theano locks its folder, and a rank that finds its code there need not wait."""
        first = mpi_environment.local_rank() == 0
        if not first:
            self.meet((COMPILE,))
        try:
            try:
                yield
            finally:
                if first:
                    self.meet((COMPILE,))
            self.meet((COMPILE, 1))
        except BaseException as error:
            self.raise_common(error)

    def _abort(self, what, waited):
        """End the job: called by the watchdog."""
        rank_process.show_output()
        others = ' or '.join(map(self.name, self._senders))
        rank_process.say('%s, %s, has waited %.0f s for data from %s, and ends the job; %s'
                         % (self.name(self.rank), self.describe(what), waited, others, REMEDY))
        rank_process.abort(1)

    def _end(self):
        """Leave the job when the script ends; ranks that have not ended learn of it, and so does this one."""
        if sys.exc_info()[0] is not None:
            return
        if getattr(sys, 'last_type', None) is not None:  # uncaught, and shown by a hook of the script's own
            rank_process.show_output()
            rank_process.abort(1)
        try:
            if not self.lost:
                self.meet((END,))
        except Exception:  # a RankError, or that of a rank that has failed
            rank_process.show_output()
            if not self.lost:
                time.sleep(60)  # the other ranks end the job
        if self.lost:
            rank_process.say('%s ends the job, since it has lost the other ranks (%s)'
                             % (self.name(self.rank), self.lost))
            rank_process.abort(1)
        # Here, since nothing can look after it once Python has ended; by C, since it keeps Python's lock.
        rank_process.exit_after(config.mgpu.timeout)
        for request in self._requests:
            request.Free()
        self._mpi.Finalize()
