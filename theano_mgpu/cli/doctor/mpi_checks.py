"""A check of `theano-mgpu doctor`: two MPI processes add a number."""
import os
import subprocess
import sys
from importlib import metadata

from ...errors import MgpuError
from ..job_command import find_mpirun, mpirun_options
from .host_checks import OK, SKIP, WARN, Finding

PROBE = """
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
if MPI.COMM_WORLD.rank == 0:
    print('size %d, total %d' % (MPI.COMM_WORLD.size, total))
"""


def check_mpirun(setup):
    """Start two ranks on this host; at most a warning, since nothing else needs them."""
    try:
        metadata.version('mpi4py')
        mpirun = find_mpirun()
    except metadata.PackageNotFoundError:
        return Finding(SKIP, 'needs mpi4py; optional, for several processes')
    except MgpuError as error:
        text, _, remedy = str(error).partition('. ')
        return Finding(WARN, text, remedy)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('OMPI_COMM', 'PMIX_'))}
    command = [mpirun] + mpirun_options(2, {}, 2) + [sys.executable, '-c', PROBE]
    try:
        done = subprocess.run(command, universal_newlines=True, timeout=60, env=environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return Finding(WARN, 'two processes did not end within 60 s', 'Try it yourself: ' + ' '.join(command[:-1]))
    if done.stdout.strip() != 'size 2, total 3':
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip('- ')]
        messages = [line for line in lines if 'Error' in line] or lines or ['no output']
        return Finding(WARN, 'two processes cannot add a number: %s' % messages[-1],
                       "mpirun and mpi4py must belong to the same MPI. Debian's: apt-get install openmpi-bin "
                       'python3-mpi4py')
    return Finding(OK, '%s: two processes start and add a number' % mpirun)
