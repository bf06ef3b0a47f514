"""The start of MPI, which waits for every rank of the job, and the ranks that do not come.

MPI itself waits for ever, also for a rank that has ended: Open MPI's mpirun ends a job only by an exit code other than
0, and Slurm's srun not even then.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from ..utils import mpi_environment, rank_process
from ..utils.flag_text import own_flag, parse_flags
from ..utils.mpi_environment import local_size, rank, size
from .activities import PATIENT

LOOK = 0.5     # seconds from one look at the processes of the job to the next
ABSENT = 4     # seconds without a rank until the job is ended: a launcher that ends it itself takes less
NOTED = 30     # seconds of waiting until the user is told: far more than an import takes
LAUNCHERS = (*rank_process.STARTERS, 'slurmstepd', 'hydra_pmi_proxy')  # the programs whose children are the ranks
FLAGS = os.environ.get('THEANO_FLAGS', '')  # while Theano is imported, they are without this package's own
JOB = 'PMIX_NAMESPACE', 'SLURM_JOB_ID', 'SLURM_STEP_ID'  # variables that tell jobs apart


def start(mpi: Any, level: int) -> None:
    """Start MPI, with a level of thread support, together with all ranks; end this process where one does not come."""
    # Not mpi4py's own function, which keeps Python's lock, so that no thread could look.
    initialise, has_started = ctypes.CDLL(mpi.__file__).MPI_Init_thread, threading.Event()
    threading.Thread(target=_watch, args=(has_started,), daemon=True).start()
    initialise(None, None, level, ctypes.byref(ctypes.c_int()))
    has_started.set()
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py raises them


def _watch(has_started):
    """Wait until all ranks have come; note, or end this process, where one does not."""
    waited = absent = 0.0
    limit = PATIENT * int(parse_flags(FLAGS).get('mgpu.timeout', own_flag('mgpu.timeout')))
    host = rank_process.host()
    while not has_started.wait(LOOK):
        waited += LOOK
        here = ranks_here()
        missing = [number for number in range(size()) if not here.get(number)]
        is_first = rank() == min(set(range(size())) - set(missing), default=rank())
        may_know = any(name in LAUNCHERS for name in rank_process.parents())  # whose other children can be seen, too
        absent = absent + LOOK if may_know and len(here) < local_size() else 0.0
        if absent >= ABSENT:
            gone = ['%d' % number for number in missing if number not in here]
            _end(is_first, 'rank %s ended before it had imported theano_mgpu, and the other ranks wait for it in MPI: '
                 'the job is ended. Every rank has to make the same calls: look for an exit on some ranks only'
                 % (', '.join(gone) if local_size() == size() else 'of host ' + host))
        text = 'rank %d has waited %.0f s for %s, as far as host %s shows' % (
            rank(), waited, 'rank %s to import theano_mgpu' % ', '.join(map(str, missing)) if missing else
            'MPI to connect the ranks', host)
        if limit and waited >= limit:
            _end(is_first, text + ', and ends the job. Look at what the ranks do; the flag mgpu.timeout sets a tenth '
                 'of this time, in seconds (0: for ever)')
        if waited == NOTED and is_first:
            rank_process.say('note: %s, and goes on waiting' % text)


def _end(is_first, text):
    """End this process, and so the job; the first rank says why."""
    if is_first:
        rank_process.say(text)
    rank_process.end_all(1)


def ranks_here() -> dict[int, bool]:
    """Return the ranks that have a process on this host, and whether each has loaded MPI's library. Linux only."""
    found: dict[int, bool] = {}
    rank_variable = getattr(mpi_environment.launcher(), 'variables', ('',))[0]
    for process in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or is no rank
            entries = (process / 'environ').read_text(errors='replace').split('\0')
            variables = dict(entry.partition('=')[::2] for entry in entries)
            if all(variables.get(name) == os.environ.get(name) for name in JOB):
                number = int(variables[rank_variable])
                found[number] = found.get(number, False) or 'libmpi' in (process / 'maps').read_text(errors='replace')
    return found
