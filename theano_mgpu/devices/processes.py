"""Contexts of the CPU that are processes: forks of this one, which compute functions over memory that all share.

A process has inherited the compiled functions, and keeps no state: arguments, values of shared variables and results
lie in an arena, which the parent lays out. So a process that has died, or that does not have a new function yet, is
forked again, in milliseconds.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import warnings
import weakref
from multiprocessing import connection
from pathlib import Path
from typing import Any, Iterator, NoReturn

import theano

from ..comm.failures import packed
from ..utils import blas
from ..utils.rank_process import end_with, note
from .arena import Arena
from .context_map import Context
from .contexts import has_opened_gpu

LOOK = 1.0  # seconds from one look for a process that does not reply to the next

# A function here is ``compute(message, ask)``: it returns a reply, and ``ask(question)`` another message.
_functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_workers: dict[Context, Worker] = {}
_made, _is_fork = 0, False
_forking: int | None = None  # the thread that forks a process of a context
_saved: Any = None           # while a script forks: the values in the arena, or the error of copying them
_changing = threading.RLock()


class ProcessDied(Exception):
    """A process has ended before it replied; the text says how."""


class CannotFork(Exception):
    """A process would have to be forked where that fails, or while another thread computes.

    OpenBLAS waits for ever in a fork while another thread is within a product that several threads compute.
    """


@functools.lru_cache(maxsize=None)
def arena() -> Arena:
    """Return the arena of this process and of its forks."""
    return Arena()


def may_fork() -> bool:
    """Return whether contexts can be processes.

    CUDA, OpenCL and OpenMP do not survive a fork; a fork of the script has one core. No process here uses MPI, which a
    fork of a rank may not.
    """
    return hasattr(os, 'fork') and not (has_opened_gpu() or theano.config.openmp or _is_fork)


def add_function(function: Any) -> int:
    """Return the number of a new function with a method `compute`; a process has it from its next fork on."""
    global _made
    with _changing:
        _functions[_made], _made = function, _made + 1
        return _made - 1


def lock() -> Any:
    """Return the lock for the thread whose calls the processes compute."""
    return _changing


def worker_of(context: Context) -> Worker:
    """Return the Worker of a context."""
    with _changing:
        if context not in _workers:
            _workers[context] = Worker()
        return _workers[context]


class Worker:
    """The process of a context, as its parent sees it."""

    def __init__(self) -> None:
        self._connection: Any = None
        self._process = self._known = 0
        self._owes = False  # a reply
        self._ended = ''  # how the process has ended

    def begin(self, number: int, message: Any) -> None:
        """Send a message to the process, for the function of a number; BLAS has as many threads there as here now.

        Raise a CannotFork if there is no process that has the function, and none can be forked now.
        """
        # One that owes a reply, as after Ctrl-C at any moment, would give the reply to another call.
        if self._owes or self._connection is None or number >= self._known:
            self.end_process()
            self._fork()
        self._owes = True
        with contextlib.suppress(OSError):  # it has died, which `receive` reports
            self._connection.send((number, blas.threads(), message))

    def receive(self) -> tuple[str, Any]:
        """Wait for the next message: a question, a reply, or an error; raise a ProcessDied if the process has died."""
        try:
            while not self._connection.poll(LOOK):  # a fork of the script may have its end of the connection, too
                if not self._is_alive():
                    raise EOFError
            what, reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ProcessDied(self.end_process()) from error
        self._owes = what == 'asks'
        return what, reply

    def answer(self, message: Any) -> None:
        """Send an answer to a question of the process."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def end_process(self) -> str:
        """End the process, if there is one, and return how it has ended. Ctrl-C may come at any line."""
        connected, self._connection = self._connection, None
        if connected is not None:
            connected.close()
        if self._process and self._is_alive():
            os.kill(self._process, signal.SIGKILL)
            self._wait(0)
        self._owes = False
        return self._ended

    def give_up(self) -> None:
        """End the process, if it owes a reply."""
        if self._owes:
            self.end_process()

    def forget(self) -> None:
        """Leave the process to the parent: this is a fork."""
        if self._connection is not None:
            self._connection.close()

    def _is_alive(self):
        if not self._ended:
            self._wait(os.WNOHANG)
        return not self._ended

    def _wait(self, options):
        try:
            process, status = os.waitpid(self._process, options)
        except ChildProcessError:  # the script has waited for all its children
            self._ended = 'in a way that is not known'
            return
        if process:
            self._ended = 'by signal %d' % os.WTERMSIG(status) if os.WIFSIGNALED(status) else \
                'with exit code %d' % os.WEXITSTATUS(status)

    def _fork(self):
        global _forking
        arena()
        # Products that other threads begin meanwhile have one thread of BLAS, which a fork survives.
        with _changing, _undisturbed(), blas.limited_threads(1):
            if _others_compute():
                raise CannotFork
            try:
                (ours, theirs), parent = connection.Pipe(), os.getpid()
                _forking = threading.get_ident()
                self._process, self._known, self._ended = os.fork(), _made, ''
            except OSError as error:  # a limit of files, of processes, or of memory
                note('no process can be forked for a context of the CPU, whose part this one computes: %s' % error)
                raise CannotFork from error
            finally:
                _forking = None
            if not self._process:
                ours.close()
                _serve(theirs, parent)
        theirs.close()
        self._connection = ours


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no Ctrl-C come between a fork and its loop, in which it ignores it; and no advice against forks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # since Python 3.12, if there are threads
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _others_compute():
    """Return whether another thread of Python may be within a product: not one that waits, as for a queue, or for us.
    """
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.current_thread()]
    return not all(map(_waits, others))


def _waits(thread):
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        return Path('/proc/self/task/%s/stat' % thread).read_text().rpartition(')')[2].split()[0] == 'S'
    return False


def _serve(connected: Any, parent: int) -> NoReturn:
    """Compute the messages of the parent, in a fork, until it closes the connection, or ends."""
    try:
        for each in signal.valid_signals():  # they are the parent's: handlers of the script, and Ctrl-C
            if callable(signal.getsignal(each)):
                signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)
        end_with(parent, signal.SIGKILL)
        _close_files(connected.fileno())
        gc.disable()  # a collection would touch, and copy, all pages
        while True:
            number, n_threads, message = connected.recv()
            blas.set_threads(n_threads, in_fork=True)
            try:
                connected.send(('done', _functions[number].compute(message, functools.partial(_asked, connected))))
            except Exception as error:
                connected.send(('failed', packed(error)))
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)


def _close_files(but):
    """Close all files but one and the standard ones: else pipes and locks of the script stay open when it closes them.
    """
    for each in map(int, os.listdir('/dev/fd')):
        if each > 2 and each != but:
            with contextlib.suppress(OSError):  # the one that was listed with
                os.close(each)


def _asked(connected, question):
    connected.send(('asks', question))
    return connected.recv()


def _before_fork() -> None:
    """Save the values in the arena for a fork of the script, which must not see later ones."""
    global _saved
    if arena.cache_info().currsize and not _is_fork and _forking != threading.get_ident():
        _changing.acquire()  # no call of a process is under way
        try:
            _saved = arena().saved()
        except (MemoryError, OSError) as error:
            _saved = error


def _after_fork() -> None:
    """Go on after a fork of the script."""
    global _saved
    if _saved is not None and _forking != threading.get_ident():
        _saved = None
        _changing.release()


def _begin_fork() -> None:
    """Leave the processes, and the arena, to the parent, in a fork."""
    global _is_fork, _changing, _saved
    _is_fork, _changing = True, threading.RLock()
    for worker in _workers.values():
        worker.forget()
    _workers.clear()
    if _saved is not None and _forking != threading.get_ident():
        try:
            if isinstance(_saved, Exception):
                raise _saved
            arena().leave(_saved)
        except (MemoryError, OSError) as error:
            note('process %d, a fork of %d, ends: it has no memory for the values that processes of contexts have '
                 'computed: %s' % (os.getpid(), os.getppid(), error))
            os._exit(1)
    _saved = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_fork)
