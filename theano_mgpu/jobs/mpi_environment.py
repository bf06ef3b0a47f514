"""The rank of this process, from the environment variables that mpirun sets. MPI is not started here."""
import os

from .. import config

# (rank, ranks, rank on this host, ranks on this host) as Open MPI, MPICH and Intel MPI, and Slurm's PMI name them.
VARIABLES = (
    ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'),
    ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
)
QUIET = 'MGPU_QUIET'  # set by `theano-mgpu launch`: only rank 0 prints
RANK_PROCESS = 'MGPU_RANK_PROCESS'  # process id of a rank, which it sets for the processes that it starts
# Read once: a fork of a rank counts as that rank.
_started_by_rank = os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())
STEPPED = b'\0theano_mgpu: a step is done\0'  # written to stderr once; `theano-mgpu launch` removes it


def _number(position, default):
    for names in VARIABLES:
        if os.environ.get(names[1], '').isdecimal():
            value = os.environ.get(names[position], '')
            return int(value) if value.isdecimal() else default
    return default


def rank():
    """Number of this process in its MPI job.

    Returns
    -------
    int
        From 0; 0 outside of a job.
    """
    return _number(0, 0)


def size():
    """Number of processes in the MPI job of this process.

    Returns
    -------
    int
        1 outside of a job.
    """
    return _number(1, 1)


def started_by_rank():
    """Whether a rank started this process, as multiprocessing's spawn does.

    Such a process inherits the environment of a rank but is not a rank: MPI can be started only once for each rank.
    """
    return _started_by_rank


def is_rank():
    """Whether this process is a rank of an MPI job with several processes."""
    return size() > 1 and not _started_by_rank


def trains_together():
    """Whether this process trains one model together with others; mgpu.executor=serial or threads prevents that."""
    return is_rank() and config.own_flag('mgpu.executor') not in ('serial', 'threads')


def local_rank():
    """Number of this process among those of its job on this host."""
    return _number(2, rank())


def local_size():
    """Number of processes of the job on this host."""
    return _number(3, size())
