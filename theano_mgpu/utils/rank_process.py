"""This process as a rank of an MPI job: only rank 0 prints, and a failure on one rank ends all of them."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import IO, Any, Callable, Iterator

from ..errors import PREFIX, MgpuError
from . import mpi_environment, owned, progress, python2

SHOWN = 4000     # bytes of a quiet rank's output that are shown when it fails
MOST = 1 << 20   # bytes of its output from which on these alone are kept
OFTEN = 0.1      # seconds from one look at the size of its output to the next
LOOK = 0.02      # seconds from one look of a spare process for its file to the next
HEAD_START = 1.0  # seconds in which rank 0 may report an error that occurs on several ranks, so that it is shown once

PR_SET_PDEATHSIG = 1
STARTERS = ('mpirun', 'orterun', 'orted', 'prterun', 'prted')  # programs with which Open MPI starts ranks

_libc = ctypes.CDLL(None) if sys.platform == 'linux' else None  # loaded now: loading may fail after a fork
_terminal: IO[str] | None = None  # the stderr that the process was started with
_terminal_file: Any = None        # the status of its file
_output: IO[str] | None = None    # file with the output of a quiet rank
_hook, _thread_hook = sys.excepthook, threading.excepthook  # of the program
# Functions of an error: why a script of another year ends with it, and what to do; or ''.
hints: list[Callable[[BaseException], str]] = [python2.hint]
_alone: list[str] = []  # names of functions that each rank computes by itself
_joined = False   # whether this process exchanges values with other ranks


def host() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def end_with(parent: int, number: int) -> None:
    """Ask the kernel to send a signal to this process when its parent, of this id, ends, by SIGKILL too. Linux only."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it had ended already
            os.kill(os.getpid(), number)


def parents() -> Iterator[str]:
    """Yield the name of the program that started this process, then of the one that started that one, ... Linux only.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):  # not Linux, or the process has ended
        while parent:
            with open('/proc/%d/stat' % parent, errors='replace') as file:
                name, _, fields = file.read().partition('(')[2].rpartition(')')
            yield name
            parent = int(fields.split()[1])


def install() -> None:
    """Make an uncaught exception end the whole job; capture the output of ranks above 0 if the launcher asks for it.

    In a process that is no rank, hints follow the traceback of an uncaught exception.
    """
    global _terminal, _terminal_file, _output
    if next(parents(), '') in STARTERS:
        end_with(os.getppid(), signal.SIGKILL)  # a killed mpirun would leave its ranks running
    report(mpi_environment.STARTED)
    if not mpi_environment.is_rank():
        sys.excepthook = _show
    if not mpi_environment.is_rank() or _terminal is not None:
        return
    os.environ[mpi_environment.RANK_PROCESS] = str(os.getpid())
    _terminal, _terminal_file = os.fdopen(os.dup(2), 'w', buffering=1), os.fstat(2)
    if os.environ.get(mpi_environment.QUIET) and mpi_environment.rank() > 0:
        _output = tempfile.TemporaryFile('w+', errors='replace')
        fcntl.fcntl(_output, fcntl.F_SETFL, os.O_APPEND)  # later lines follow the ones that a cut leaves
        _flush()
        os.dup2(_output.fileno(), 1)
        os.dup2(_output.fileno(), 2)
        threading.Thread(target=_bound, args=[_output.fileno()], name='theano_mgpu output', daemon=True).start()
    atexit.register(_note_if_alone)
    faulthandler.enable(_terminal)
    sys.excepthook = _fail
    threading.excepthook = _fail_in_thread


def _bound(output):
    """Cut a file down to its end, again and again, while this and other processes write to it."""
    file, end = os.fstat(output), ctypes.create_string_buffer(SHOWN)
    libc = ctypes.PyDLL(None)  # its calls keep Python's lock: no other thread prints between them
    while owned.is_at(output, file):
        if os.fstat(output).st_size > MOST:
            libc.lseek(output, ctypes.c_long(-SHOWN), os.SEEK_END)
            length = libc.read(output, end, SHOWN)
            libc.ftruncate(output, ctypes.c_long(0))
            libc.write(output, end, length)
        time.sleep(OFTEN)


def say(text: str) -> None:
    """Print a line to the original stderr of the process, also on a quiet rank; nothing where that is closed."""
    stream = _terminal if _terminal and owned.is_at(_terminal.fileno(), _terminal_file) else sys.stderr
    if stream is not None:  # else Python would print to stdout
        stream.write('%s%s\n' % (PREFIX, text))  # at once: print would write the end of the line on its own
        stream.flush()


@functools.lru_cache(maxsize=None)
def note(text: str) -> None:
    """Print a line for the user to stderr, unless it is empty, on rank 0 only; the same line only once."""
    if text and mpi_environment.rank() == 0:
        say('note: ' + text)


progress.note, progress.is_first = note, lambda: mpi_environment.rank() == 0


def show_output() -> None:
    """Print the end of a quiet rank's output."""
    if _output is None:
        return
    _flush()
    size = os.fstat(_output.fileno()).st_size
    text = os.pread(_output.fileno(), SHOWN, max(0, size - SHOWN)).decode(errors='replace').strip()
    if text:
        say('rank %d (%s) had printed:\n%s' % (mpi_environment.rank(), host(), text))


@functools.lru_cache(maxsize=None)
def report(what: str) -> None:
    """Report to the launcher, on rank 0 and once, what this job has come to, such as `mpi_environment.STEP`."""
    folder = os.environ.get(mpi_environment.REPORTS)
    if folder and mpi_environment.rank() == 0 and not mpi_environment.started_by_rank():
        with contextlib.suppress(OSError):  # the folder is on another host
            open(os.path.join(folder, what), 'wb').close()


@functools.lru_cache(maxsize=None)
def wait_until_needed() -> None:
    """Wait in a spare process until the launcher needs it; return at once in any other process, and later on.

    It has run the script up to the first checkpoint: it has imported, built and compiled all by then.
    """
    path = os.environ.pop(mpi_environment.SPARE, None)
    if path is None or mpi_environment.started_by_rank():
        return
    report(mpi_environment.READY)
    while not os.path.exists(path):  # a launcher that is killed ends this process, see `install`
        time.sleep(LOOK)


def _note_if_alone():
    """Note at the end of a rank if it has exchanged nothing with the others, as in a plain Keras script."""
    if mpi_environment.is_rank() and 'theano' in sys.modules and not _joined:
        note('the %d processes did not work together: each ran the whole script by itself. They share the functions of '
             'theano_mgpu, and the Keras models and Theano functions of a script that is started by "theano-mgpu '
             'launch -n %d run SCRIPT"'
             % (mpi_environment.size(), mpi_environment.size()))


def note_alone(name: str) -> None:
    """Note, of the first such function, that each rank computes it by itself; not once values are exchanged."""
    _alone.append(name)
    if mpi_environment.is_rank() and not _joined:
        note('%s is made by plain Theano or Keras: each of the %d processes computes it whole, by itself. To divide it '
             'among them, start the script by "theano-mgpu launch -n %d run SCRIPT", or call enable() before'
             % (_alone[0], mpi_environment.size(), mpi_environment.size()))


def note_joined() -> None:
    """Record that this process exchanges values with other ranks, or has no script that could."""
    global _joined
    _joined = True


def _fail(kind, error, trace):
    """Print one message and end all ranks, even if printing fails: the excepthook of a rank."""
    if not mpi_environment.is_rank():  # a fork of one
        return sys.__excepthook__(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        abort(130)
    end_all(1, functools.partial(_report, kind, error, trace))


def note_hints(error: BaseException) -> None:
    """Note for which Python or Keras a script is written, if it is for another one, and what to do."""
    for hint in hints:
        note(hint(error))


def _show(kind, error, trace):
    """Show an uncaught exception, then the hints: the excepthook of a process that is no rank."""
    _hook(kind, error, trace)
    note_hints(error)


def _report(kind, error, trace):
    if getattr(error, 'elsewhere', False):
        time.sleep(4 * HEAD_START)  # the rank with the original error ends the job first
    note_hints(error)
    text = 'rank %d of %d (host %s, process %d) failed:\n%s' % (
        mpi_environment.rank(), mpi_environment.size(), host(), os.getpid(),
        ''.join(traceback.format_exception(kind, error, trace)).rstrip())
    try:
        show_output()
    except Exception as failure:  # the error is more important than earlier output
        text += '\n(its earlier output cannot be shown: %s: %s)' % (type(failure).__name__, failure)
    say(text)


def end_all(code: int, report: Callable[[], None] = show_output) -> None:
    """End every rank of the job after an error, which this rank has printed, or reports; return at once outside of one.

    Python's own exit would wait in MPI for the other ranks, and they for this one.
    """
    if not mpi_environment.is_rank():
        return
    try:
        if mpi_environment.rank() > 0:
            time.sleep(HEAD_START + 0.1 * mpi_environment.rank())
        report()
    finally:
        abort(code)


def _fail_in_thread(arguments):
    """End the job if the error of a thread is of this package, since other ranks would wait: the hook of threads."""
    if issubclass(arguments.exc_type, MgpuError) and mpi_environment.is_rank():
        _fail(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    _thread_hook(arguments)


def _flush():
    for stream in (sys.stdout, sys.stderr, _terminal):
        with contextlib.suppress(Exception):  # a script may have closed or replaced it; the rest must still run
            stream.flush()


def exit_after(seconds: float) -> None:
    """End this process, and with it the job, after a number of seconds; 0 means never."""
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_terminal or 2)


def abort(code: int) -> None:
    """End every rank of the job."""
    _flush()
    # If MPI cannot end the other ranks, mpirun does when this process has ended.
    timer = threading.Timer(5, os._exit, (code,))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # Python 3.12 starts no thread while it ends
        exit_after(5)
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)
