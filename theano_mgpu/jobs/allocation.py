"""The hosts that a scheduler has given to this job, from the environment variables that it sets."""
import os
from collections import Counter, namedtuple

from ..errors import MgpuError
from .mpi_environment import per_node

SLURM, PBS, LSF, HOSTFILE = 'Slurm', 'PBS', 'LSF', 'hostfile'
DEFAULT_HOSTFILE = 'OMPI_MCA_orte_default_hostfile'  # set in the launcher of a Kubernetes MPIJob


class Allocation(namedtuple('Allocation', 'scheduler hosts nodes tasks cpus cpus_per_task')):
    """Hosts, and the number of processes for each.

    Attributes
    ----------
    scheduler : str
        One of the constants of this module.
    hosts : str
        Their names, as the scheduler writes them.
    nodes : int
        Number of hosts. Within a step of Slurm, `tasks` are those of the step, which may have fewer.
    tasks : list of int
        For each host.
    cpus : list of int
        For each host; empty where the scheduler does not tell.
    cpus_per_task : int
        What the user has asked for; 0 if nothing, or where the scheduler does not tell.
    """

    def __str__(self):
        return '%s: %d tasks on %s' % (self.scheduler, sum(self.tasks), self.hosts)


def allocation():
    """The allocation in which this process runs, or None.

    Raises
    ------
    MgpuError
        If the file that lists the hosts cannot be read.
    """
    get = os.environ.get
    if get('SLURM_JOB_ID') and get('SLURM_JOB_NODELIST'):
        # As srun does without -n: one on each node.
        nodes = int(get('SLURM_JOB_NUM_NODES', '1'))
        tasks = per_node(get('SLURM_TASKS_PER_NODE', '1')) if get('SLURM_NTASKS') else [1] * nodes
        return Allocation(SLURM, get('SLURM_JOB_NODELIST'), nodes, tasks, per_node(get('SLURM_JOB_CPUS_PER_NODE', '')),
                          int(get('SLURM_CPUS_PER_TASK', '0')))
    if get('PBS_JOBID') and get('PBS_NODEFILE'):
        return _listed(PBS, Counter(_lines(get('PBS_NODEFILE'))))
    if get('LSB_JOBID') and get('LSB_DJOB_HOSTFILE'):
        return _listed(LSF, Counter(_lines(get('LSB_DJOB_HOSTFILE'))))
    if get('LSB_JOBID') and get('LSB_MCPU_HOSTS'):
        words = get('LSB_MCPU_HOSTS').split()
        return _listed(LSF, {host: int(number) for host, number in zip(words[::2], words[1::2])})
    if get(DEFAULT_HOSTFILE):
        slots = dict(map(_slots, _lines(get(DEFAULT_HOSTFILE))))
        return _listed(HOSTFILE, slots) if slots else None  # the file that comes with Open MPI has no hosts
    return None


def _listed(scheduler, tasks):
    return Allocation(scheduler, ','.join(tasks), len(tasks), list(tasks.values()), [], 0)


def _lines(path):
    """The lines of a list of hosts, without comments."""
    try:
        with open(path) as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except OSError as error:
        raise MgpuError('the list of the hosts of this job cannot be read: %s. Start on its first host, where the '
                        'scheduler writes it' % error) from error
    return [line for line in lines if line]


def _slots(line):
    """Host and number of processes in a line of Open MPI's: ``a slots=4``, or ``a:4``."""
    words = line.replace('=', ' ').replace(':', ' slots ').split()
    return words[0], int(words[words.index('slots') + 1]) if 'slots' in words else 1
