"""How the ranks of an MPI job meet: a few integers go from each to each, so that all know that all do the same.

A rank that does something else, has failed, or does not come is found at once, or in time, and by name.
"""
import functools
import threading

import numpy as np
from theano import config

from ..errors import MgpuError, RankError
from ..jobs import rank_process
from .failures import description, packed, unpacked
from .process_group import (
    ADD,
    AGREE,
    BUILD,
    CALL,
    COMPARE,
    COMPILE,
    END,
    FAILED,
    FEED,
    GATHER,
    READ,
    SHARE,
    WIDTH,
    Ranks,
)
from .waiting import REMEDY, poll

TAG = 0x6d67
MAIL, WRITTEN, PARTS, SENT = TAG + 1, TAG + 2, TAG + 3, TAG + 4  # of other messages
# While one rank compiles, or reads a file, the others wait for longer than in a step: PATIENT times the limit.
SLOW = (END, BUILD, COMPILE, SHARE, COMPARE, FEED)
PATIENT = 10


class Turn:
    """A ``with`` block for one thread at a time, as often within another as it likes: an MgpuError for a second one.

    Parameters
    ----------
    ranks : Ranks
    """

    def __init__(self, ranks):
        self._ranks = ranks
        self._lock = threading.RLock()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            raise MgpuError('two threads of %s use functions over the ranks of the job at the same time. Every rank '
                            'has to make the same calls in the same order: call such functions from one thread, or '
                            "keep them to this process by executor='serial'" % self._ranks.name(self._ranks.rank))

    def __exit__(self, *error):
        self._lock.release()


class Meeting(Ranks):
    """The processes of an MPI job, as far as they meet.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.

    Attributes
    ----------
    lost : str or None
        Why nothing can be exchanged any more: a meeting was interrupted and its messages are left over, or the
        progress of the other ranks is unknown.
    """

    def __init__(self, mpi):
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.hosts = {self.rank: rank_process.host()}
        self.lost = None
        self._functions = []
        self._divided = {}  # a set in the order in which values were divided, which is the same on all ranks
        self._meetings = 0  # equal on all ranks at the same place of the script
        self._turn = Turn(self)
        self._sent = np.zeros(3 + WIDTH, 'int64')
        self._received = np.zeros((self.size, 3 + WIDTH), 'int64')
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._senders = {rank: self._comm.Recv_init(self._received[rank], rank, TAG) for rank in others}
        self._requests = [self._comm.Send_init(self._sent, rank, TAG) for rank in others] + list(self._senders.values())

    def name(self, rank):
        """A rank and its host, for messages."""
        return 'rank %d (host %s)' % (rank, self.hosts[rank]) if rank in self.hosts else 'rank %d' % rank

    def one_thread(self):
        return self._turn

    def meet(self, what, values=()):
        with self.one_thread():
            self._send_to_each(what, values)
            if (self._received[:, :3] != self._sent[:3]).any():
                if (self._received[:, 0] == FAILED).any():
                    raise self._error_of_first(None)
                self._raise_difference()
            return self._received[:, 3:3 + len(values)].copy()

    def _send_to_each(self, what, values=()):
        """Send this rank's integers, and wait for those of the others."""
        self._meetings += 1
        if self.lost:
            raise RankError('this process has lost the other ranks of its job (%s). End it, and start the job '
                            'again from its last checkpoint' % self.lost)
        self._sent[:] = 0
        self._sent[:len(what)] = what
        self._sent[3:3 + len(values)] = values
        self._received[self.rank] = self._sent
        self._mpi.Prequest.Startall(self._requests)
        self._wait(what)

    def _wait(self, what):
        reported = 0.0
        try:
            for waited in poll(functools.partial(self._mpi.Request.Testall, self._requests)):
                limit = config.mgpu.timeout
                if limit and waited - reported > limit:
                    reported = waited
                    self._tell_who_is_missing(what, waited, limit * (PATIENT if what[0] in SLOW else 1))
        except BaseException as error:
            self.lost = self.lost or str(error) or type(error).__name__
            raise

    def _tell_who_is_missing(self, what, waited, limit):
        missing = [rank for rank, request in self._senders.items() if not request.Get_status()]
        if what[0] == END and missing == [0]:
            return  # what a script does on rank 0 alone, once all is trained, may take any time
        text = '%s, %s, has waited %.0f s for %s' % (self.name(self.rank), self.describe(what), waited,
                                                     ', '.join(map(self.name, missing)))
        if waited < limit:
            rank_process.say(text + ', and goes on waiting')
            return
        raise self.lose(text + ', which did not come')

    def _raise_difference(self):
        """Ranks do different things: say which does what."""
        doing = ['%s: %s' % (self.name(rank), self.describe(row[:3])) for rank, row in enumerate(self._received)]
        ended = [self.name(rank) for rank, row in enumerate(self._received) if row[0] == END]
        if ended:
            raise RankError('%s ended while others go on (%s). Every rank has to make the same calls: look for an '
                            'exit on some ranks only; where each feeds its own data, call join() once they end'
                            % (', '.join(ended), '; '.join(doing)))
        raise RankError('the ranks do different things. %s. Every rank has to make the same calls in the same order, '
                        'from one thread: do on one rank (mgpu.rank() == 0) only what calls no function over several '
                        'contexts' % '; '.join(doing))

    def describe(self, what):
        """What a rank is doing, in words."""
        what = tuple(map(int, what)) + (0,) * (3 - len(what))
        known = what[1] < len(self._functions)
        function = '%s (number %d)' % (self._functions[what[1]] if known else 'a function unknown here', what[1])
        return {END: 'at its end', BUILD: 'building a function', COMPILE: 'compiling in turn', SHARE: 'sharing values',
                CALL: 'in call %d of %s' % (what[2] + 1, function), ADD: 'adding up what each rank has computed',
                GATHER: 'gathering the rows of a batch', AGREE: 'at the end of a step',
                FAILED: 'in a step that has failed', FEED: 'at a batch that rank 0 makes for all',
                COMPARE: 'comparing the results of %s that each rank has computed whole, after call %d'
                         % (function, what[2]),
                READ: "reading a value of which each rank has a part (update_on='sharded')"}[what[0]]

    def agree(self):
        self.meet((AGREE,))

    def common_error(self, error, of_step=False):
        if isinstance(error, RankError) or getattr(error, 'known_to_all', False):
            return error
        if not isinstance(error, (Exception, SystemExit)):  # Ctrl-C: the progress of the others is unknown
            self.lost = 'a step was interrupted: %s' % type(error).__name__
            return error
        try:
            with self.one_thread():
                self._send_to_each((FAILED, of_step))
                return self._error_of_first(error)
        except MgpuError:  # others do not come, or a thread meets them: this rank's error is the one to report
            return error

    def _error_of_first(self, error):
        """Return the error of the first rank that has failed, once the ranks have met; `error` is this rank's own."""
        first = int(np.flatnonzero(self._received[:, 0] == FAILED)[0])
        with self._watchdog((FAILED,)):
            package = self._comm.bcast(packed(error) if first == self.rank else None, first)
        if first != self.rank and (error is None or description(error) != package[:2]):
            where = {COMPILE: 'to compile this function, which was therefore given up on every rank',
                     COMPARE: 'in one of the last batches. Each rank computes them whole, and this one has done so'}
            error = unpacked(package, '%s failed %s' % (
                self.name(first), where.get(self._sent[0], 'here, which was therefore given up on every rank')))
        error.known_to_all, error.of_step = True, bool(self._received[first, 1])
        return error

    def note_divided(self, gather):
        self._divided[gather] = None

    def note_whole(self, gather):
        self._divided.pop(gather, None)

    def whole(self):
        for gather in list(self._divided):
            gather()

    def lose(self, text):
        """A RankError to raise, since another rank does not answer; every later use of the ranks raises one, too."""
        self.lost = text
        return RankError('%s. Look at what it does; %s' % (text, REMEDY))

    def function_number(self, name):
        self._functions.append(name or 'a function')
        return len(self._functions) - 1
