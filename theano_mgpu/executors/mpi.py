"""Several processes: the ranks of an MPI job. Each runs its own tasks; here is how they agree and add.

Every rank makes the same calls in the same order. Before they exchange data they meet: a few integers go
from each to each, so that a rank that does something else, or does not come, is found at once and by name.
"""
import atexit
import contextlib
import functools
import os
import sys
import time

import numpy as np
from theano import config

from .. import job, launched
from ..errors import MgpuError, RankError
from .ranks import AGREE, BUILD, CALL, END, SHARE, WIDTH, Ranks

SPIN = 0.02              # seconds of waiting before a rank begins to sleep in between
NAP = 0.005              # the longest of these sleeps
TAG = 0x6d67
MAIL = TAG + 1
WRITTEN = TAG + 2
LONGEST = 1 << 30        # bytes in one message: MPI counts up to 2**31


@functools.lru_cache(maxsize=None)
def mpi_ranks():
    """The ranks of this job; the same object for every function."""
    return MpiRanks(import_mpi())


def import_mpi():
    """mpi4py's MPI, initialised.

    Raises
    ------
    MgpuError
        If mpi4py or MPI's library is missing, or MPI knows of one process where the environment tells of several.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MgpuError('several processes need mpi4py and an MPI library: %s. Debian: apt-get install '
                        'python3-mpi4py openmpi-bin (a virtual environment sees them if made with '
                        '--system-site-packages); or mgpu.executor=threads, so that each process trains by itself'
                        % error) from error
    if MPI.COMM_WORLD.size != launched.size():
        raise MgpuError('the environment says that this is one of %d processes, MPI says of %d: mpi4py belongs to '
                        'another MPI (%s) than the mpirun that started this'
                        % (launched.size(), MPI.COMM_WORLD.size, MPI.Get_library_version().split(',')[0]))
    return MPI


class MpiRanks(Ranks):
    """All processes of an MPI job.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, mpi):
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self._functions = []
        self._unsent = []
        self._meetings = 0  # equal on all ranks at the same place of the script
        self._sent = np.zeros(3 + WIDTH, 'int64')
        self._received = np.zeros((self.size, 3 + WIDTH), 'int64')
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._senders = {rank: self._comm.Recv_init(self._received[rank], rank, TAG) for rank in others}
        self._requests = [self._comm.Send_init(self._sent, rank, TAG) for rank in others] + list(self._senders.values())
        self.hosts = {self.rank: job.host()}
        self.meet((SHARE,))
        self.hosts = dict(enumerate(self._comm.allgather(job.host())))
        atexit.register(self._end)

    def name(self, rank):
        """A rank and its host, for messages."""
        return 'rank %d (host %s)' % (rank, self.hosts[rank]) if rank in self.hosts else 'rank %d' % rank

    def meet(self, what, values=(), patience=None):
        self._meetings += 1
        self._sent[:] = 0
        self._sent[:len(what)] = what
        self._sent[3:3 + len(values)] = values
        self._received[self.rank] = self._sent
        self._mpi.Prequest.Startall(self._requests)
        self._wait(what, patience)
        if (self._received[:, :3] != self._sent[:3]).any():
            self._raise_difference()
        return self._received[:, 3:3 + len(values)].copy()

    def _wait(self, what, patience):
        started = told = time.monotonic()
        limit = patience or config.mgpu.timeout
        while not self._mpi.Request.Testall(self._requests):
            now = time.monotonic()
            os.sched_yield()  # where there are more ranks than cores, another one may need this
            if now - started > SPIN:
                time.sleep(min(NAP, (now - started) / 100))
            if limit and now - told > limit:
                told = now
                self._tell_who_is_missing(what, now - started, patience)

    def _tell_who_is_missing(self, what, waited, patience):
        missing = [self.name(rank) for rank, request in self._senders.items() if not request.Get_status()]
        text = '%s, %s, has waited %.0f s for %s' % (self.name(self.rank), self.describe(what), waited,
                                                     ', '.join(missing))
        if patience:
            raise RankError(text + ', which did not come. Look at what it does; a longer time to wait is set by the '
                            'flag mgpu.timeout, in seconds (0: for ever)')
        if what[0] != END:
            job.say(text + ', and goes on waiting')

    def _raise_difference(self):
        """Ranks do different things: say which does what."""
        doing = ['%s: %s' % (self.name(rank), self.describe(row[:3])) for rank, row in enumerate(self._received)]
        ended = [self.name(rank) for rank, row in enumerate(self._received) if row[0] == END]
        if ended:
            raise RankError('%s ended while others go on (%s). Every rank has to make the same calls: look for an '
                            'exit on some ranks only; where each feeds its own data, call join() once they end'
                            % (', '.join(ended), '; '.join(doing)))
        raise RankError('the ranks do different things. %s. Every rank has to make the same calls in the same order: '
                        'do on one rank (mgpu.rank() == 0) only what calls no function over several contexts'
                        % '; '.join(doing))

    def describe(self, what):
        """What a rank is doing, in words."""
        what = tuple(map(int, what)) + (0,) * (3 - len(what))
        known = what[1] < len(self._functions)
        function = '%s (number %d)' % (self._functions[what[1]] if known else 'a function unknown here', what[1])
        return {END: 'at its end', BUILD: 'building function number %d' % what[1],
                CALL: 'in call %d of %s' % (what[2] + 1, function), AGREE: 'at the end of a step of %s' % function,
                SHARE: 'compiling in turn' if what[1] else 'sharing values'}[what[0]]

    def agree(self, error=None):
        failed = self.meet((AGREE,), [error is not None], config.mgpu.timeout)[:, 0]
        if error is not None:
            raise error
        if failed.any():
            names = [self.name(rank) for rank in np.flatnonzero(failed)]
            told = RankError('%s failed in this step, which was therefore given up on every rank; its own message '
                             'says why' % ', '.join(names))
            told.elsewhere = True
            raise told

    def add(self, arrays):
        for array in arrays:
            self._comm.Allreduce(self._mpi.IN_PLACE, array)

    def gather(self, rows, lengths):
        shapes = [shape for shape, length in zip(self._comm.allgather(rows.shape[1:]), lengths) if length]
        shape = shapes[0] if shapes else rows.shape[1:]
        whole = np.empty((sum(lengths),) + shape, rows.dtype)
        row_bytes = int(np.prod(shape, dtype='int64')) * rows.itemsize
        counts = [length * row_bytes for length in lengths]
        mine = np.ascontiguousarray(rows[:lengths[self.rank]])
        self._comm.Allgatherv([mine.view('uint8').reshape(-1) if mine.size else np.empty(0, 'uint8'), self._mpi.BYTE],
                              [whole.reshape(-1).view('uint8'), counts, None, self._mpi.BYTE])
        return whole

    def broadcast(self, values):
        self.meet((SHARE,))
        return [self._broadcast(value) for value in values]

    def _broadcast(self, value):
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return self._comm.bcast(value, 0)
        value = np.array(value, order='C')
        flat = value.reshape(-1).view('uint8')
        for start in range(0, flat.size, LONGEST):
            self._comm.Bcast([flat[start:start + LONGEST], self._mpi.BYTE], 0)
        return value

    def tell(self, value, root=0):
        self.meet((SHARE,))
        return self._comm.bcast(value, root)

    def collect(self, value):
        self.meet((SHARE,))
        return self._comm.gather(value, 0)

    def post(self, rank, message, tag=MAIL):
        """Send a picklable message to a rank, without waiting for it to be taken."""
        self._unsent = [request for request in self._unsent if not request.Test()]
        self._unsent.append(self._comm.isend(message, rank, tag))

    def take(self, tag=MAIL):
        """The next message that was posted to this rank: ``(rank, message)``, or None if there is none yet."""
        status = self._mpi.Status()
        found = self._comm.improbe(tag=tag, status=status)
        return (status.source, found.recv()) if found is not None else None

    def write_by_first(self, path, write):
        if self.rank:
            if not self._is_written(path):
                write()
            return
        error = None
        try:
            write()
        except BaseException as failure:
            error = failure
            raise
        finally:
            for rank in range(1, self.size):
                self.post(rank, (path, self._meetings, self.reported(error)), WRITTEN)

    def _is_written(self, path):
        """Wait until rank 0 has written a file, or has gone on without it; whether it was written."""
        started = time.monotonic()
        while True:
            # Rank 0's messages come in the order in which it sent them: once it is at the next meeting, what it has
            # not written here before it will not write.
            gone_on = self._comm.iprobe(0, TAG)
            found = self.take(WRITTEN)
            if found:
                written, meetings, error = found[1]
                if (written, meetings) == (path, self._meetings):
                    if error is not None:
                        raise error
                    return True
            elif gone_on:
                return False
            else:
                self._wait_for_file(path, time.monotonic() - started)

    def _wait_for_file(self, path, waited):
        if config.mgpu.timeout and waited > config.mgpu.timeout:
            raise RankError('%s has waited %.0f s for %s to write %s. Make the call on every rank, or on rank 0 alone; '
                            'a longer time to wait is set by the flag mgpu.timeout, in seconds (0: for ever)'
                            % (self.name(self.rank), waited, self.name(0), path))
        time.sleep(NAP)

    @contextlib.contextmanager
    def first_compiler(self):
        """Theano locks its folder of compiled code: who finds its code there does not wait for whoever compiles."""
        first = launched.local_rank() == 0
        if not first:
            self.meet((SHARE, 1))
        yield
        if first:
            self.meet((SHARE, 1))

    def function_number(self, name):
        self._functions.append(name or 'a function')
        return len(self._functions) - 1

    def _end(self):
        """Leave the job when the script ends; whoever goes on learns of it, and so does this rank."""
        if sys.exc_info()[0] is None:
            try:
                self.meet((END,))
            except RankError:
                job.show_output()
                time.sleep(60)  # the other ranks end the job
