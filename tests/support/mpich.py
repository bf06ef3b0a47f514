"""MPICH and an mpi4py for it, from PyPI, in a folder of their own."""
import fcntl
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / 'build' / 'mpich'
MPIEXEC = FOLDER / 'bin' / 'mpiexec'
# An mpi4py that takes any MPI library finds this one.
ENVIRONMENT = {'PYTHONPATH': str(FOLDER / 'lib' / ('python%d.%d' % sys.version_info[:2]) / 'site-packages'),
               'MPI4PY_LIBMPI': str(FOLDER / 'lib' / 'libmpi.so.12')}


def install():
    """Download both packages, once; raise an error if that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / 'ready', 'a+') as ready:  # with the version of Python that they are for
        fcntl.flock(ready, fcntl.LOCK_EX)  # by one test process
        ready.seek(0)
        if ready.read() != sys.version:
            subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--ignore-installed',
                            '--prefix', str(FOLDER), 'mpich>=4,<6', 'mpi4py>=4.1,<5'], check=True)
            ready.truncate(0)
            ready.write(sys.version)


def environment(**variables):
    """Return the environment of processes whose mpi4py belongs to MPICH."""
    return dict(os.environ, **ENVIRONMENT, **variables)
