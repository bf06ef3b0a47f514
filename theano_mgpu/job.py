"""A process as a rank of an MPI job: quiet unless it is the first one, and loud when it fails."""
import faulthandler
import functools
import os
import socket
import sys
import tempfile
import threading
import time
import traceback

from . import launched

SHOWN = 4000     # characters of a quiet rank's output that are shown when it fails
HEAD_START = 1.0  # seconds in which rank 0 may tell what failed on several ranks, so that it is told once

_terminal = None  # the stderr that the process was started with
_output = None    # what a quiet rank has printed


def host():
    """Name of this host."""
    return socket.gethostname()


def install():
    """Have an uncaught exception end the whole job; keep ranks other than 0 quiet if the launcher wants that."""
    global _terminal, _output
    if not launched.is_rank() or _terminal is not None:
        return
    os.environ[launched.RANK_PROCESS] = str(os.getpid())
    _terminal = os.fdopen(os.dup(2), 'w', buffering=1)
    if os.environ.get(launched.QUIET) and launched.rank() > 0:
        _output = tempfile.TemporaryFile('w+', errors='replace')
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(_output.fileno(), 1)
        os.dup2(_output.fileno(), 2)
    faulthandler.enable(_terminal)
    sys.excepthook = _fail


def say(text):
    """Print a line to the stderr that the process was started with, also from a quiet rank."""
    print('theano_mgpu: ' + text, file=_terminal or sys.stderr)


@functools.lru_cache(maxsize=None)
def note(text):
    """Print a line for the user to stderr, from the first rank alone; the same one only once."""
    if launched.rank() == 0:
        say('note: ' + text)


def show_output():
    """Print what a quiet rank has printed so far: its end."""
    if _output is None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    size = os.fstat(_output.fileno()).st_size
    text = os.pread(_output.fileno(), SHOWN, max(0, size - SHOWN)).decode(errors='replace').strip()
    if text:
        say('rank %d (%s) had printed:\n%s' % (launched.rank(), host(), text))


def _fail(kind, error, trace):
    """The excepthook of a rank: one message, then the end of all ranks."""
    if issubclass(kind, KeyboardInterrupt):
        abort(130)
    if getattr(error, 'elsewhere', False):
        time.sleep(4 * HEAD_START)  # whoever has the error itself ends the job meanwhile
    elif launched.rank() > 0:
        time.sleep(HEAD_START + 0.1 * launched.rank())
    show_output()
    say('rank %d of %d (host %s, process %d) failed:\n%s'
        % (launched.rank(), launched.size(), host(), os.getpid(),
           ''.join(traceback.format_exception(kind, error, trace)).rstrip()))
    abort(1)


def abort(code):
    """End every rank of the job."""
    for stream in (sys.stdout, sys.stderr, _terminal):
        if stream is not None:
            stream.flush()
    # Should MPI not manage to end the others, mpirun does, once this process has ended.
    threading.Thread(target=lambda: (time.sleep(5), os._exit(code)), daemon=True).start()
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)
