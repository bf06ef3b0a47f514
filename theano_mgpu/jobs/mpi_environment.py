"""Which of several processes this is: what the environment says that mpirun gives each rank. No MPI is started here."""
import os

from .. import config

# (rank, ranks, rank on this host, ranks on this host) as Open MPI, MPICH and Intel MPI, and Slurm's PMI name them.
VARIABLES = (
    ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'),
    ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
)
QUIET = 'MGPU_QUIET'  # set by `theano-mgpu launch`: ranks other than 0 do not print
RANK_PROCESS = 'MGPU_RANK_PROCESS'  # set by each rank, for the processes that it starts: its process id
# Looked up once: a fork of a rank goes on as that rank.
_started_by_rank = os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())
STEPPED = b'\0theano_mgpu: a step is done\0'  # written to stderr once: `theano-mgpu launch` takes it out, and restarts


def _number(position, default):
    for names in VARIABLES:
        if os.environ.get(names[1], '').isdecimal():
            value = os.environ.get(names[position], '')
            return int(value) if value.isdecimal() else default
    return default


def rank():
    """Number of this process among those of its MPI job; 0 outside of one."""
    return _number(0, 0)


def size():
    """Processes of the MPI job that this one belongs to; 1 outside of one."""
    return _number(1, 1)


def started_by_rank():
    """Whether a rank started this process, as multiprocessing's spawn does.

    It inherits the environment of a rank, and is no rank itself: MPI can be started only once in its name.
    """
    return _started_by_rank


def is_rank():
    """Whether this process is one of several of an MPI job."""
    return size() > 1 and not _started_by_rank


def trains_together():
    """Whether this process is one of several that train one model: not where mgpu.executor keeps it to itself."""
    return is_rank() and config.own_flag('mgpu.executor') not in ('serial', 'threads')


def local_rank():
    """Number of this process among those of its job on the same host."""
    return _number(2, rank())


def local_size():
    """Processes of the job on this host."""
    return _number(3, size())
