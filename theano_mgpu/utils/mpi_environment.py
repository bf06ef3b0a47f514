"""The rank of this process, from the environment variables of its launcher. MPI is not started here."""
from __future__ import annotations

import os
import re
from typing import NamedTuple

from ..errors import MgpuError
from ..parsing import shown, whole_number
from . import flag_text

MOST_NODES = 100000
REMEDY = 'unset it and the other variables of the scheduler if this is no job of it, or start a new one'


class RankLauncher(NamedTuple):
    """A program that starts ranks, and its variables for (rank, ranks, rank on this host, ranks on this host).

    Slurm has none for the last one.
    """

    name: str
    variables: tuple[str, ...]


MPIRUN = RankLauncher("Open MPI's mpirun", ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE',
                                            'OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'))
HYDRA = RankLauncher('mpiexec of MPICH or Intel MPI', ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'))
SRUN = RankLauncher("Slurm's srun", ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_LOCALID'))
# In this order: an mpirun in an allocation counts, not the srun with which it starts its daemons. srun sets PMI's
# variables, too, but none for the rank on a host.
LAUNCHERS = MPIRUN, HYDRA, SRUN
MPI_OF_SRUN = 'SLURM_MPI_TYPE'  # in a task of srun: the value of its --mpi
QUIET = 'MGPU_QUIET'  # set by `theano-mgpu launch`: only rank 0 prints
REPORTS = 'MGPU_REPORTS'  # set by `theano-mgpu launch`: a folder on its host, in which rank 0 reports
SEED = 'MGPU_SEED'  # set by `theano-mgpu launch`: the random numbers that a script draws without a seed
SPARE = 'MGPU_SPARE'  # set by `theano-mgpu launch` for spare processes: they wait until there is a file of this name
RUN = 'MGPU_RUN'  # set by `theano-mgpu run` for processes that its script starts: its number, its file, their options
RANK_PROCESS = 'MGPU_RANK_PROCESS'  # process id of a rank, which it sets for the processes that it starts
# The beginnings of variables by which MPI finds the launcher of this process.
CONNECTION = 'PMIX_', 'OMPI_MCA_ess', 'OMPI_MCA_orte_', 'OMPI_MCA_pmix', 'PMI_FD', 'PMI_PORT'


# What rank 0 reports to `theano-mgpu launch`, each by an empty file of this name: it has imported this package; the
# ranks exchange values; a step is done; checkpoints are kept; the spare processes have come as far as they can; all
# ranks are at the end of the script.
STARTED, TOGETHER, STEP, CHECKPOINT, READY, END = 'started', 'together', 'step', 'checkpoint', 'ready', 'end'


def _value(name):
    """Return the number that a variable has, or None."""
    return whole_number(os.environ.get(name, ''), most=2 ** 32)


def per_node(name: str) -> list[int]:
    """Return Slurm's numbers for each node in a variable, as a list; an empty list if the variable is not set.

    Raises
    ------
    MgpuError
        If the variable is malformed.

    Examples
    --------
    >>> os.environ['SLURM_EXAMPLE'] = '2(x3),1'
    >>> per_node('SLURM_EXAMPLE')
    [2, 2, 2, 1]
    """
    text = os.environ.get(name, '')
    if not text:
        return []
    entries = [re.fullmatch(r'([0-9]{1,9})(?:\(x([0-9]{1,5})\))?', entry) for entry in text.split(',')]
    numbers = [(int(entry[1]), int(entry[2] or 1)) for entry in entries if entry]
    if len(numbers) < len(entries) or sum(nodes for _, nodes in numbers) > MOST_NODES:
        raise MgpuError('the variable %s=%s is not what Slurm sets, numbers for each node as in 2(x3),1: %s'
                        % (name, shown(text), REMEDY))
    return [number for number, nodes in numbers for _ in range(nodes)]


def in_slurm_step() -> bool:
    """Return whether srun started this process: a batch script and salloc's shell have most of Slurm's variables, too.

    A batch script that was submitted from within a step has even the variables of that step. But it is the only task of
    its node, and SLURM_GTIDS lists the tasks of the node.
    """
    step, node = _value('SLURM_STEP_ID'), _value('SLURM_NODEID')
    if step is None or step >= 0xfffffff0 or node is None:  # such a number is of a step without srun
        return False
    tasks = per_node('SLURM_STEP_TASKS_PER_NODE')
    return node < len(tasks) and _gtids() == tasks[node]


def _gtids():
    return len(os.environ.get('SLURM_GTIDS', '').split(','))


def launcher() -> RankLauncher | None:
    """Return the launcher that started this process as a rank, one of `LAUNCHERS`; None outside of a job."""
    for known in LAUNCHERS:
        if all(_value(name) is not None for name in known.variables[:3]) and _value(known.variables[1]) \
                and (known is not SRUN or in_slurm_step()):
            return known
    return None


def _number(position, default):
    known = launcher()
    value = _value(known.variables[position]) if known else None
    return default if value is None else value


def rank() -> int:
    """Return the number of this process in its MPI job.

    Returns
    -------
    int
        From 0; 0 outside of a job.
    """
    return _number(0, 0)


def size() -> int:
    """Return the number of processes in the MPI job of this process.

    Returns
    -------
    int
        1 outside of a job.
    """
    return _number(1, 1)


def started_by_rank() -> bool:
    """Return whether a rank forked or started this process, as multiprocessing does.

    Such a process inherits the environment of a rank but is not a rank: MPI can be started only once for each rank.
    """
    return os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())


def leave_ranks_to_this_process() -> None:
    """Have processes that this one forks or starts be no ranks; each of them may start an MPI of its own."""
    os.environ[RANK_PROCESS] = str(os.getpid())
    for name in [name for name in os.environ if name.startswith(CONNECTION)]:
        del os.environ[name]


def is_rank() -> bool:
    """Return whether this process is a rank of an MPI job with several processes."""
    return size() > 1 and not started_by_rank()


def trains_together() -> bool:
    """Return whether this process trains one model together with others, as mgpu.executor=serial or threads prevents.
    """
    return is_rank() and flag_text.own_flag('mgpu.executor') not in ('serial', 'threads')


def local_rank() -> int:
    """Return the number of this process among the processes of its job on this host."""
    return _number(2, rank())


def local_size() -> int:
    """Return the number of processes of the job on this host."""
    return _gtids() if launcher() is SRUN else _number(3, size())
