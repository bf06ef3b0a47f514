"""The MPI library that mpi4py loads, and whether it and the launcher of this process know each other.

Processes that they leave alone would each train by themselves: every one of them finds one rank.
"""
import importlib
import os
import re
import shutil
import subprocess
import sys

from ..errors import MgpuError
from . import mpi_environment
from .mpi_environment import HYDRA, JSRUN, MPI_OF_SRUN, MPIRUN, PALS, PMI, SRUN

OPEN_MPI = 'Open MPI'
# Where MPI starts without a launcher some implementations abort.
PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__ + '\\n' + MPI.Get_library_version().rstrip('\\0'))
"""


def probe():
    """Load mpi4py in a process of its own, without starting MPI; its CompletedProcess, with text.

    The first line of the output is mpi4py's version, the rest is what the library says of itself.
    """
    return subprocess.run([sys.executable, '-c', PROBE], universal_newlines=True, timeout=60,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def loaded():
    """What the library of mpi4py says of itself; '' if it cannot be loaded."""
    return probe().stdout.partition('\n')[2]


def first_line(library):
    """Name and version of a library, in a line.

    Examples
    --------
    >>> first_line('Open MPI v4.1.4, package: Debian'), first_line('MPICH Version:   4.0.2\\nDate: 1')
    ('Open MPI v4.1.4', 'MPICH Version: 4.0.2')
    """
    return ' '.join(re.split(r'[\n,]', library)[0].split())


def components(mpirun):
    """What an Open MPI was built with, as the text that its ompi_info and prte_info print; '' without them."""
    found = ''
    for name in ('ompi_info', 'prte_info'):  # from version 5 on, what starts the ranks is a project of its own
        path = shutil.which(name, path=os.path.dirname(mpirun)) or shutil.which(name)
        if path:
            found += subprocess.run([path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, universal_newlines=True, check=False).stdout
    return found


def has_component(found, framework, name):
    """Whether the text of `components` lists a component.

    Examples
    --------
    >>> has_component('   MCA plm: tm (MCA v2.1.0, API v2.0.0)', 'plm', 'tm')
    True
    """
    return re.search(r'MCA %s: %s \(' % (framework, name), found) is not None


def type_for_srun(library, offered):
    """What ``srun --mpi`` has to name, for a library and the types that this Slurm offers; None if none fits.

    Examples
    --------
    >>> type_for_srun('Open MPI v4.1.4', 'none pmi2 pmix'), type_for_srun('MPICH Version: 4.0', 'none pmi2 pmix')
    ('pmix', 'pmi2')
    """
    if not library:
        return None
    words = re.findall(r'\bpm\w+', offered)
    pmix = sorted((word for word in words if word.startswith('pmix')), key=lambda word: (word != 'pmix', word))
    if not library.startswith(OPEN_MPI):
        return 'pmi2' if 'pmi2' in words else None
    if pmix:
        return pmix[0]
    speaks_pmi2 = has_component(components(shutil.which('mpirun') or ''), 'pmix', 's2')
    return 'pmi2' if 'pmi2' in words and speaks_pmi2 else None


def started():
    """mpi4py's MPI, initialised.

    Raises
    ------
    MgpuError
        If it cannot find the other ranks. Most libraries would end the process, with a message of their own.
    ImportError, RuntimeError
        If mpi4py or the library is missing.
    """
    rc = importlib.import_module('mpi4py').rc
    settings, rc.initialize, rc.finalize = (rc.initialize, rc.finalize), False, True
    try:
        mpi = importlib.import_module('mpi4py.MPI')
    finally:
        rc.initialize, rc.finalize = settings
    if not mpi.Is_initialized():
        library = mpi.Get_library_version()
        if not can_find_ranks(library):
            raise MgpuError(mismatch(library, None))
        mpi.Init_thread(getattr(mpi, 'THREAD_' + rc.thread_level.upper()))
    return mpi


def can_find_ranks(library):
    """Whether a library may find the other ranks of this job, as far as that is known before it starts."""
    launcher, is_open_mpi = mpi_environment.launcher(), library.startswith(OPEN_MPI)
    if mpi_environment.size() == 1 or launcher not in (MPIRUN, SRUN):
        return True
    if launcher is MPIRUN:
        return not re.search(r'MPICH|MVAPICH|Intel\(R\) MPI', first_line(library))
    if 'PMI_RANK' in os.environ:
        return not is_open_mpi or type_for_srun(library, 'pmi2') is not None
    return 'PMIX_RANK' in os.environ


def missing(reason):
    """The error of several processes without mpi4py, or without the library that it loads."""
    return ('several processes need mpi4py and an MPI library: %s. Debian: apt-get install python3-mpi4py openmpi-bin '
            '(a virtual environment sees them if made with --system-site-packages); or mgpu.executor=threads, so that '
            'each process trains by itself' % reason)


def mismatch(library, found):
    """The error of processes that the launcher and MPI count differently.

    Parameters
    ----------
    library : str
        What the library says of itself.
    found : int or None
        The number of processes that it finds; None if it is not started, since it could not.
    """
    launcher, count = mpi_environment.launcher(), mpi_environment.size()
    if launcher is None:
        return ('MPI (%s) finds %d processes, but no variable gives the rank of this one. Known are %s. Use another '
                'launcher, or set these variables for each process' % (first_line(library), found, ', '.join(
                    sorted({name for known in mpi_environment.LAUNCHERS for name in known.variables[:3] if name}))))
    given = ''
    if launcher is SRUN:
        kind = os.environ.get(MPI_OF_SRUN, 'none')
        given = ' without --mpi' if kind == 'none' else ' with --mpi=' + kind
    return ('%s%s started %d processes, but the MPI library of mpi4py, %s, %s%s. %s. If the processes are to be '
            'independent, set THEANO_FLAGS=mgpu.executor=threads'
            % (launcher.name, given, count, first_line(library),
               'cannot connect them' if found is None else 'finds %d' % found,
               ': each would train by itself' if found in (None, 1) else '', remedy(launcher, library)))


def remedy(launcher, library):
    """What starts the processes together: another command, or an mpi4py of the launcher's MPI."""
    rebuild = 'install mpi4py for this MPI: with its mpicc first on PATH, python -m pip install --force-reinstall ' \
        '--no-binary=mpi4py mpi4py'
    if launcher is SRUN:
        fitting = 'pmix' if library.startswith(OPEN_MPI) else 'pmi2'
        return 'Use srun --mpi=%s (srun --mpi=list shows what this Slurm has), or theano-mgpu launch in the batch ' \
            'script, or the mpirun of that library' % fitting
    if launcher in (HYDRA, PALS, PMI) and library.startswith(OPEN_MPI):
        return "Start them with Open MPI's mpirun or theano-mgpu launch; or " + rebuild
    if launcher in (MPIRUN, JSRUN) and not library.startswith(OPEN_MPI):
        return 'Start them with the mpiexec of that library; or ' + rebuild
    return 'Start them with the mpirun of the same installation; or ' + rebuild
