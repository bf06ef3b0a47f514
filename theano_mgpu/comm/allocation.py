"""The hosts that a scheduler has given to this job, from the environment variables that it sets."""
from __future__ import annotations

import os
import re
from collections import Counter
from typing import NamedTuple

from ..errors import MgpuError
from ..parsing import bare, is_host, shown, whole_number
from ..utils.mpi_environment import MOST_NODES, REMEDY, per_node

SLURM, HOSTFILE = 'Slurm', 'hostfile'
DEFAULT_HOSTFILE = 'OMPI_MCA_orte_default_hostfile'  # set in the launcher of a Kubernetes MPIJob


class Allocation(NamedTuple):
    """The hosts of a job, and the number of processes for each.

    `tasks` and `cpus` are for each host; within a step of Slurm, for the hosts of the step, which may be fewer than
    `nodes`. Where the scheduler does not tell, `cpus` is empty, and `cpus_per_task`, as the user has asked for, is 0.
    """

    scheduler: str
    hosts: str
    nodes: int
    tasks: list[int]
    cpus: list[int] = []
    cpus_per_task: int = 0

    def __str__(self) -> str:
        return '%s: %d tasks on %s' % (self.scheduler, sum(self.tasks), bare(self.hosts))


def allocation() -> Allocation | None:
    """Return the allocation in which this process runs, or None.

    Raises
    ------
    MgpuError
        If a variable of the scheduler is malformed, or the file that lists the hosts cannot be read or is malformed.
    """
    get = os.environ.get
    if get('SLURM_JOB_ID') and get('SLURM_JOB_NODELIST'):
        return _of_slurm()
    return _of_hostfile(get(DEFAULT_HOSTFILE))


def _of_slurm():
    nodes, cpus_per_task = _number('SLURM_JOB_NUM_NODES', 1, 1), _number('SLURM_CPUS_PER_TASK', 0, 0)
    # As srun does without -n: one on each node.
    tasks = per_node('SLURM_TASKS_PER_NODE') or [1] if os.environ.get('SLURM_NTASKS') else [1] * nodes
    if 0 in tasks:
        raise MgpuError('the variable SLURM_TASKS_PER_NODE=%s has a node without a task: %s'
                        % (shown(os.environ['SLURM_TASKS_PER_NODE']), REMEDY))
    return Allocation(SLURM, os.environ['SLURM_JOB_NODELIST'], nodes, tasks, per_node('SLURM_JOB_CPUS_PER_NODE'),
                      cpus_per_task)


def _number(name, least, default):
    """Return the number in a variable of Slurm."""
    text = os.environ.get(name)
    number = whole_number(text, least, MOST_NODES) if text else default
    if number is None:
        raise MgpuError('the variable %s=%s is not a number from %d to %d: %s'
                        % (name, shown(text), least, MOST_NODES, REMEDY))
    return number


def _of_hostfile(path):
    """Return the allocation of a list of hosts, where a host may be listed repeatedly; None for no hosts."""
    tasks = Counter()
    for line in _lines(path) if path else ():
        # As Open MPI's: ``a slots=4``, ``a:4`` or ``a``.
        words = re.sub(r'\s*=\s*', '=', line).split()
        host, colon, number = words[0].partition(':')
        settings = dict(word.partition('=')[::2] for word in words[1:])
        slots = whole_number(number if colon else settings.get('slots', '1'), 1, MOST_NODES)
        if slots is None or not is_host(host):
            raise MgpuError('%s in the list of the hosts of this job (%s=%s) is no host and a number of processes: %s'
                            % (shown(line), DEFAULT_HOSTFILE, shown(path), REMEDY))
        tasks[host] += slots
    # The file of Open MPI itself has no hosts.
    return Allocation(HOSTFILE, ','.join(tasks), len(tasks), list(tasks.values())) if tasks else None


def _lines(path):
    """Return the lines of a list of hosts, without comments."""
    try:
        if not os.path.isfile(path):
            raise OSError('it is no file')
        with open(path) as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, or a path with a null byte
        raise MgpuError('the list of the hosts of this job cannot be read (%s=%s): %s. Start in the launcher of '
                        'the MPIJob, which has it, or unset the variable' % (DEFAULT_HOSTFILE, shown(path), error)
                        ) from error
    return [line for line in lines if line]
