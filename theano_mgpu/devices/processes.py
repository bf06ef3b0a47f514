"""Contexts of the CPU that are processes: forks of this one, which compute functions over memory that all share.

A process has inherited the compiled functions, and keeps no state: arguments, values of shared variables and results
lie in an arena, which the parent lays out. So a process that has died, or that does not have a new function yet, is
forked again, in milliseconds.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import signal
import sys
import threading
import warnings
import weakref
from multiprocessing import connection
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import theano

from ..comm.rank_errors import packed
from ..utils import blas
from ..utils.attributes import collector_paused
from ..utils.owned import is_at
from ..utils.rank_process import end_with, note
from . import children
from .arena import Arena
from .context_map import Context
from .contexts import has_opened_gpu

LOOK = 1.0  # seconds from one look for a process that does not reply to the next
_QUIET = {'ignore', 'warn', 'raise'}  # what `numpy.seterr` may say where a process computes

# A function here is ``compute(message, ask)``: it returns a reply, and ``ask(question)`` another message.
_functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_workers: dict[Context, Worker] = {}
_made, _is_fork = 0, False
_forking: int | None = None  # the thread that forks a process of a context
_saved: Any = None           # while a script forks: whether the arena is saved, or the error of that
_changing = threading.RLock()
_warned: dict[Any, Any] = {}  # the warnings of processes that were shown, as of a module


class ProcessDied(Exception):
    """A process has ended before it replied; the text says how."""


class CannotFork(Exception):
    """A process would have to be forked where that fails, or while another thread computes; or a call has to be here.

    OpenBLAS waits for ever in a fork while another thread is within a product that several threads compute. NumPy tells
    functions of the script of its errors here, if `numpy.seterr` says so.
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
    return sys.platform == 'linux' and not (has_opened_gpu() or theano.config.openmp or _is_fork)


def add_function(function: Any) -> int:
    """Return the number of a new function with a method `compute`; a process has it from its next fork on."""
    global _made
    with _changing:
        _functions[_made], _made = function, _made + 1
        return _made - 1


@contextlib.contextmanager
def turn() -> Iterator[bool]:
    """Have the processes compute for this thread alone in the block; give whether they are free for a call.

    Within a call of this thread, they are not: a handler of a signal, or a destructor, may call functions, too.
    """
    are_free = not _changing._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks
    with _changing:
        if are_free:
            arena().forget()  # values change from now on
        yield are_free


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
        self._file: Any = None  # the status of its file
        self._process = self._known = 0
        self._lent: Any = None  # memory that the process reads and writes until it replies
        self._ended = ''  # how the process has ended
        children.add(self)

    def begin(self, number: int, message: Any, lent: Any) -> None:
        """Send a message to the process, for the function of a number; BLAS has as many threads there as here now.

        The memory in `lent` stays as it is until the process has replied, or has ended. Raise a CannotFork if there is
        no process that has the function, and none can be forked now.
        """
        errors = np.geterr()
        if not _QUIET.issuperset(errors.values()):
            raise CannotFork
        # One that owes a reply, as after Ctrl-C at any moment, would give the reply to another call.
        is_free = self._lent is None and self._connection is not None and not self._ended and self._is_open()
        if not is_free or number >= self._known:
            self.end_process()
            self._fork()
        self._lent = lent
        self._send((number, blas.threads(), errors, message))

    def receive(self) -> tuple[str, Any]:
        """Wait for the next message: a question, a reply, or an error; raise a ProcessDied if the process has died."""
        try:
            while not self._connection.poll(LOOK):  # a fork of the script may have its end of the connection, too
                if not self._is_alive():
                    raise EOFError
            what, reply, printed, warned = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ProcessDied(self.end_process()) from error
        if what != 'asks':
            self._lent = None
        if printed:
            print(printed, end='')
        for text, category, file, line in warned:
            warnings.warn_explicit(text, category, file, line, registry=_warned)
        return what, reply

    def answer(self, message: Any, lent: Any) -> None:
        """Send an answer to a question of the process, which gets more memory."""
        self._lent = self._lent, lent
        self._send(message)

    def _send(self, message):
        """Send a message, if the process has not died: `receive` reports that, and the script's SIGPIPE does not."""
        is_blocked = signal.SIGPIPE in signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        try:
            with contextlib.suppress(OSError):
                self._connection.send(message)
            if not is_blocked and signal.SIGPIPE in signal.sigpending():
                signal.sigwait([signal.SIGPIPE])
        finally:
            if not is_blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])

    def _is_open(self):
        """Return whether the connection's file is still its own: a script may close all, and open others."""
        return is_at(self._connection.fileno(), self._file)

    def end_process(self) -> str:
        """End the process, if there is one, and return how it has ended. Ctrl-C may come at any line."""
        self.forget()
        self.kill()
        self._lent = None
        return self._ended

    def kill(self) -> None:
        """End the process, if there is one: `receive` reports it."""
        if self._process and self._is_alive():
            with contextlib.suppress(ProcessLookupError):  # the script ignores SIGCHLD, and the process has just ended
                os.kill(self._process, signal.SIGKILL)
            self._wait(0)

    def give_up(self) -> None:
        """End the process, if it owes a reply."""
        if self._lent is not None:
            self.end_process()

    def forget(self) -> None:
        """Close the connection, if there is one: a fork leaves the process to its parent."""
        connected, self._connection = self._connection, None
        if connected is not None:
            if not is_at(connected.fileno(), self._file):
                connected._handle = None  # else it would close a file of the script
            connected.close()

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
        is_main = threading.current_thread() is threading.main_thread()
        # Products that other threads begin meanwhile have one thread of BLAS, which a fork survives.
        with _changing, blas.limited_threads(1), _undisturbed() as signals:
            if _others_compute():
                raise CannotFork
            try:
                (ours, theirs), parent = connection.Pipe(), os.getpid()
                _forking = threading.get_ident()
                self._process, self._known, self._ended = os.fork(), _made, ''
            except (OSError, RuntimeError) as error:  # a limit of files, processes or memory; or Python is ending
                note('no process can be forked for a context of the CPU, whose part this one computes: %s' % error)
                raise CannotFork from error
            finally:
                _forking = None
            if not self._process:
                try:
                    ours.close()
                    _serve(theirs, parent if is_main else None, signals)
                finally:
                    os._exit(1)
        theirs.close()
        self._connection, self._file = ours, os.fstat(ours.fileno())


@contextlib.contextmanager
def _undisturbed() -> Iterator[set[int]]:
    """Keep code of the script out of a fork that begins in the block; give the signals that were blocked before.

    No handler of a signal, tracer, debugger, destructor of garbage or of another thread's values runs there, and Python
    gives no advice against forks.
    """
    kept, tracer, profiler = _values_of_threads(), sys.gettrace(), sys.getprofile()
    if not callable(profiler):  # of cProfile: Python cannot set it again, and it does no harm
        profiler = None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        sys.settrace(None)
        if profiler is not None:
            sys.setprofile(None)
        with _handlers_held(), collector_paused(), warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # since Python 3.12, if there are threads
            yield before
    finally:
        del kept
        if profiler is not None:
            sys.setprofile(profiler)
        sys.settrace(tracer)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handlers_held():
    """Have handlers of signals run after the block, in which this thread blocks signals.

    Another thread may get a signal, and Python runs its handler in the main thread all the same: a hook of a fork would
    lose the error of the handler, and not come to its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers, came, is_over = _handlers(), [], False

    def hold(number, frame):
        if is_over:  # a handler has raised an error while the others came back
            handlers[number](number, frame)
        else:
            came.append(number)
    try:
        for each in handlers:
            signal.signal(each, hold)
        yield
    finally:
        try:
            with contextlib.ExitStack() as stack:
                for each, handler in handlers.items():
                    stack.callback(signal.signal, each, handler)
        finally:
            is_over = True
            for each in set(came):
                signal.raise_signal(each)  # it waits until this thread takes signals again


def _handlers():
    """Return the functions that Python calls for signals, by the numbers of these."""
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    return {each: handler for each, handler in handlers.items() if callable(handler)}


def _values_of_threads():
    """Return the values of each `threading.local`: in a fork, Python deletes the values of other threads.

    It would close their connections to a database, and remove their temporary folders.
    """
    if len(sys._current_frames()) == 1:
        return []
    # Not by isinstance, which asks some objects of a script for their class, and they fail.
    return [list(each.values()) for local in gc.get_objects() if issubclass(type(local), threading.local)
            for each in gc.get_referents(local) if isinstance(each, dict)]


def _others_compute():
    """Return whether another thread of Python may be within a product: not one that waits, as for a queue, or for us.
    """
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.current_thread()]
    return not all(map(_waits, others))


def _waits(thread):
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        return Path('/proc/self/task/%s/stat' % thread).read_text().rpartition(')')[2].split()[0] == 'S'
    return False


def _serve(connected: Any, parent: int | None, signals: set[int]) -> None:
    """Compute the messages of the parent, in a fork, until it closes the connection, or ends.

    The kernel ends the fork with the thread that has forked it: without a number of the parent it does not.
    """
    for each in _handlers():  # they are the parent's: handlers of the script, and Ctrl-C
        signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    sys.setprofile(None)
    if parent is not None:
        end_with(parent, signal.SIGKILL)
    _close_files(connected.fileno())
    while True:
        try:
            number, n_threads, errors, message = connected.recv()
        except EOFError:
            os._exit(0)
        blas.set_threads(n_threads, in_fork=True)
        np.seterr(**errors)
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
            warnings.simplefilter('always')
            try:
                reply = 'done', _functions[number].compute(message, functools.partial(_asked, connected))
            except Exception as error:
                reply = 'failed', packed(error)
        shown = printed.getvalue(), [(each.message, each.category, each.filename, each.lineno) for each in caught]
        try:
            connected.send((*reply, *shown))
        except OSError:  # the parent has ended
            raise
        except Exception as error:  # a value that cannot be pickled
            connected.send(('failed', packed(error), *shown))


def _close_files(but):
    """Close all files but one and the standard ones: else pipes and locks of the script stay open when it closes them.
    """
    for each in map(int, os.listdir('/dev/fd')):
        if each > 2 and each != but:
            with contextlib.suppress(OSError):  # the one that was listed with
                os.close(each)


def _asked(connected, question):
    connected.send(('asks', question, '', []))
    return connected.recv()


def _before_fork() -> None:
    """Save the values in the arena for a fork of the script, which must not see later ones."""
    global _saved
    if arena.cache_info().currsize and not _is_fork and _forking != threading.get_ident():
        _changing.acquire()  # no call of a process is under way
        try:
            arena().save()
            _saved = True
        except OSError as error:
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
            arena().leave()
        except OSError as error:
            note('process %d, a fork of %d, ends: it has no memory for the values that processes of contexts have '
                 'computed: %s' % (os.getpid(), os.getppid(), error))
            os._exit(1)
    _saved = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_fork)
