"""The MPI library that mpi4py loads, and whether it and the launcher of this process know each other.

Processes that are not connected would each train by themselves: every one of them finds one rank.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
from typing import Any

from ..errors import MgpuError
from ..utils import mpi_environment
from ..utils.attributes import temporarily
from ..utils.mpi_environment import HYDRA, MPI_OF_SRUN, MPIRUN, SRUN, RankLauncher
from . import joining

OPEN_MPI = 'Open MPI'
FINALIZED = 6  # above the last of Open MPI's states of a process
# Where MPI starts without a launcher some implementations abort.
PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__ + '\\n' + MPI.Get_library_version().rstrip('\\0'))
"""


def probe() -> subprocess.CompletedProcess[str]:
    """Load mpi4py in a process of its own, without starting MPI; return its CompletedProcess, with text.

    The first line of the output is mpi4py's version, the rest is the library's description of itself.
    """
    return subprocess.run([sys.executable, '-c', PROBE], universal_newlines=True, timeout=60,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def loaded() -> str:
    """Return the description of itself that the library of mpi4py has; '' if it cannot be loaded."""
    return probe().stdout.partition('\n')[2]


def output_of(*command: str) -> str:
    """Return the text that a command prints to stdout and stderr."""
    return subprocess.run(command, universal_newlines=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT).stdout


def first_line(library: str) -> str:
    """Return the name and version of a library, in a line.

    Examples
    --------
    >>> first_line('Open MPI v4.1.4, package: Debian'), first_line('MPICH Version:   4.0.2\\nDate: 1')
    ('Open MPI v4.1.4', 'MPICH Version: 4.0.2')
    """
    return ' '.join(re.split(r'[\n,]', library)[0].split())


def components(mpirun: str) -> str:
    """Return the components of an Open MPI, as the text that its ompi_info and prte_info print; '' without them."""
    # From version 5 on, the project that starts the ranks is one of its own.
    paths = [shutil.which(name, path=os.path.dirname(mpirun)) or shutil.which(name)
             for name in ('ompi_info', 'prte_info')]
    return ''.join(output_of(path) for path in paths if path)


def type_for_srun(library: str, offered: str) -> str | None:
    """Return the type for ``srun --mpi`` that fits a library, of those that this Slurm offers; None if none does.

    Examples
    --------
    >>> type_for_srun('Open MPI v4.1.4', 'none pmi2 pmix'), type_for_srun('MPICH Version: 4.0', 'none pmi2 pmix')
    ('pmix', 'pmi2')
    """
    words, is_open_mpi = re.findall(r'\bpm\w+', offered), library.startswith(OPEN_MPI)
    pmix = sorted(word for word in words if word.startswith('pmix'))  # pmix itself comes first
    if is_open_mpi and pmix:
        return pmix[0]
    if not library or 'pmi2' not in words:
        return None
    return 'pmi2' if not is_open_mpi or 'MCA pmix: s2 (' in components(shutil.which('mpirun') or '') else None


def import_mpi() -> Any:
    """Return mpi4py's MPI, initialised; raise an MgpuError if it, or its library, is missing, or cannot find the ranks.

    Most libraries would end the process where they cannot find the other ranks.
    """
    try:
        rc = importlib.import_module('mpi4py').rc
        with temporarily(rc, 'initialize', False), temporarily(rc, 'finalize', False):
            mpi = importlib.import_module('mpi4py.MPI')
    except (ImportError, RuntimeError) as error:
        raise MgpuError(missing(error)) from error
    if not mpi.Is_initialized():
        library = mpi.Get_library_version()
        if not can_find_ranks(library):
            raise MgpuError(mismatch(library, None))
        joining.start(mpi, getattr(mpi, 'THREAD_' + rc.thread_level.upper()))
        # mpi4py would end it in each fork of this process, too.
        atexit.register(lambda: mpi_environment.started_by_rank() or mpi.Is_finalized() or mpi.Finalize())
    mpi_environment.leave_ranks_to_this_process()
    if mpi.COMM_WORLD.size != mpi_environment.size():
        raise MgpuError(mismatch(mpi.Get_library_version(), mpi.COMM_WORLD.size))
    return mpi


def leave() -> None:
    """Have MPI count as ended, in a fork of a process that has started it: its connections are of that process.

    Where a script has started MPI, mpi4py would end it at the exit of the fork, which would wait for ever, or crash. Of
    other libraries than Open MPI no such way is known.
    """
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized():
        with contextlib.suppress(ValueError):  # another library
            ctypes.c_int.in_dll(ctypes.CDLL(mpi.__file__), 'ompi_mpi_state').value = FINALIZED


def can_find_ranks(library: str) -> bool:
    """Return whether a library may find the other ranks of this job, as far as that is known before it starts."""
    launcher = mpi_environment.launcher()
    if mpi_environment.size() == 1 or launcher not in (MPIRUN, SRUN):
        return True
    if launcher is MPIRUN:
        return not re.search(r'MPICH|MVAPICH|Intel\(R\) MPI', first_line(library))
    if 'PMI_RANK' in os.environ:
        return not library.startswith(OPEN_MPI) or type_for_srun(library, 'pmi2') is not None
    return 'PMIX_RANK' in os.environ


def missing(reason: object) -> str:
    """Return the error of several processes without mpi4py, or without the library that it loads."""
    return ('several processes need mpi4py and an MPI library: %s. Debian: apt-get install python3-mpi4py openmpi-bin '
            '(a virtual environment sees them if made with --system-site-packages); or mgpu.executor=threads, so that '
            'each process trains by itself' % reason)


def mismatch(library: str, size: int | None) -> str:
    """Return the error of processes that the launcher and MPI count differently; `size` is None if MPI cannot start."""
    launcher, count = mpi_environment.launcher(), mpi_environment.size()
    if launcher is None:
        return ('MPI (%s) finds %s processes, but no variable gives the rank of this one. Known are %s. Use another '
                'launcher, or set these variables for each process' % (first_line(library), size, ', '.join(
                    sorted({name for known in mpi_environment.LAUNCHERS for name in known.variables[:3]}))))
    option = ''
    if launcher is SRUN:
        kind = os.environ.get(MPI_OF_SRUN, 'none')
        option = ' without --mpi' if kind == 'none' else ' with --mpi=' + kind
    return ('%s%s started %d processes, but the MPI library of mpi4py, %s, %s%s. %s. If the processes are to be '
            'independent, set THEANO_FLAGS=mgpu.executor=threads'
            % (launcher.name, option, count, first_line(library),
               'cannot connect them' if size is None else 'finds %d' % size,
               ': each would train by itself' if size in (None, 1) else '', remedy(launcher, library)))


def remedy(launcher: RankLauncher, library: str) -> str:
    """Return how to start the processes together: by another command, or with an mpi4py of the launcher's MPI."""
    rebuild = 'install mpi4py for this MPI: with its mpicc first on PATH, python -m pip install --force-reinstall ' \
        '--no-binary=mpi4py mpi4py'
    if launcher is SRUN:
        fitting = 'pmix' if library.startswith(OPEN_MPI) else 'pmi2'
        return 'Use srun --mpi=%s (srun --mpi=list shows what this Slurm has), or theano-mgpu launch in the batch ' \
            'script, or the mpirun of that library' % fitting
    if launcher is HYDRA and library.startswith(OPEN_MPI):
        return "Start them with Open MPI's mpirun or theano-mgpu launch; or " + rebuild
    if launcher is MPIRUN and not library.startswith(OPEN_MPI):
        return 'Start them with the mpiexec of that library; or ' + rebuild
    return 'Start them with the mpirun of the same installation; or ' + rebuild
