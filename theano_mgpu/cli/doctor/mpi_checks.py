"""Checks of `theano-mgpu doctor`: MPI processes add a number, and find each other on the hosts that they are to use."""
from __future__ import annotations

import subprocess

from ...comm import mpi_library
from ...comm.allocation import Allocation, allocation
from ...errors import MgpuError
from ...utils import mpi_environment
from ...utils.installed import installed
from ..job_command import choose_start, starting_environment
from .host_checks import FAIL, OK, SKIP, WARN, Finding, Setup

# Two nodes of a test's Slurm have one host name.
PROBE = """
import os, socket
from mpi4py import MPI
ranks = MPI.COMM_WORLD
hosts = set(ranks.allgather(os.environ.get('SLURMD_NODENAME') or socket.gethostname()))
total = ranks.allreduce(ranks.rank + 1)
if ranks.rank == 0:
    print('size %d, total %d, hosts %d' % (ranks.size, total, len(hosts)))
"""
SPREAD = 'Start them with theano-mgpu launch; or see srun --ntasks-per-node, and leave out --host of mpirun'


def check_mpirun(setup: Setup) -> Finding:
    """Start two ranks on this host, or all ranks of the allocation; at most a warning: nothing else needs them."""
    if installed('mpi4py') is None:
        return Finding(SKIP, 'needs mpi4py; optional, for several processes')
    try:
        job = allocation()
        ranks = sum(job.tasks) if job else 2
        if ranks == 1:
            return Finding(SKIP, 'this allocation has one task')
        start = choose_start(ranks, None, job)
    except MgpuError as error:
        text, _, remedy = str(error).partition('. ')
        return Finding(WARN, text, remedy)
    environment = {name: value for name, value in starting_environment().items()
                   if not name.startswith(('OMPI_COMM', 'PMIX_', 'PMI_'))}
    command = start.command(environment, ['-c', PROBE])
    try:
        done = subprocess.run(command, universal_newlines=True, timeout=60, env=environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return Finding(WARN, '%d processes did not end within 60 s' % ranks,
                       'Try it yourself: ' + ' '.join(command[:-1]))
    result, _, hosts = done.stdout.strip().rpartition(', hosts ')
    if result != 'size %d, total %d' % (ranks, ranks * (ranks + 1) // 2):
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip('- ')]
        messages = [line for line in lines if 'Error' in line] or lines or ['no output']
        return Finding(WARN, '%d processes of %s cannot add a number with %s: %s'
                       % (ranks, start.words[0], mpi_library.first_line(mpi_library.loaded()), messages[-1]),
                       "mpirun and mpi4py must belong to the same MPI. Debian's: apt-get install openmpi-bin "
                       'python3-mpi4py')
    if job and hosts == '1' and job.nodes > 1:
        return all_on_one(ranks, job)
    return Finding(OK, '%s: %s processes start and add a number%s'
                   % (start.words[0], 'two' if ranks == 2 else ranks, ', on %s hosts' % hosts if job else ''))


def all_on_one(ranks: int, job: Allocation) -> Finding:
    """Return the finding that all ranks of a job on several hosts are on one of them."""
    return Finding(WARN, 'all %d processes are on one host; the allocation has %d (%s)'
                   % (ranks, job.nodes, job.hosts), SPREAD)


def check_job(setup: Setup) -> Finding:
    """Check that MPI finds the other processes of this process's job, on all hosts of the allocation."""
    ranks = mpi_environment.size()
    try:
        library = mpi_library.import_mpi().Get_library_version()
    except MgpuError as error:
        text, _, remedy = str(error).partition('. ')
        return Finding(FAIL, text, remedy)
    job = allocation()
    if job and mpi_environment.local_size() == ranks and job.nodes > 1:
        return all_on_one(ranks, job)
    launcher = mpi_environment.launcher()
    return Finding(OK, 'rank %d of %d: %s has started them, and %s finds them' % (
        mpi_environment.rank(), ranks, launcher.name if launcher else 'something', mpi_library.first_line(library)))
