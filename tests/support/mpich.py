"""MPICH and an mpi4py for it, from PyPI, in a folder of their own."""
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
    """Download both, once; an error if that fails."""
    if not (FOLDER / 'ready').exists():
        subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--ignore-installed',
                        '--prefix', str(FOLDER), 'mpich>=4,<6', 'mpi4py>=4.1,<5'], check=True)
        (FOLDER / 'ready').touch()


def environment(**variables):
    """The environment of processes whose mpi4py is that of MPICH."""
    return dict(os.environ, **ENVIRONMENT, **variables)
