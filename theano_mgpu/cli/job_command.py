"""The command that starts the ranks of a job: Open MPI's mpirun, or srun in an allocation of Slurm."""
import os
import shutil
import subprocess
import sys
from collections import namedtuple

from ..errors import MgpuError, MissingError
from ..jobs import mpi_environment, mpi_library
from ..jobs.allocation import DEFAULT_HOSTFILE, HOSTFILE, LSF, PBS, SLURM
from ..parsing import bare, is_host, whole_number
from .launcher_output import OWN_DESCRIPTOR

# Environment variables that processes on other hosts need; mpirun itself passes on OMPI_* only.
CARRIED = ('THEANO_FLAGS', 'THEANORC', 'PYTHONPATH', 'PYTHONHASHSEED', 'PYTHONSAFEPATH', 'KERAS_BACKEND', 'KERAS_HOME',
           'POCL_DEVICES', 'LD_LIBRARY_PATH', 'CUDA_HOME', mpi_environment.QUIET, mpi_environment.SEED)
# A lost host is noticed within 10 seconds; with Open MPI's defaults it takes 8 minutes.
KEEPALIVE = {'oob_tcp_keepalive_time': 3, 'oob_tcp_keepalive_intvl': 1, 'oob_tcp_keepalive_probes': 3}
THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')
# Open MPI's component that starts its daemons through the scheduler, and the scheduler's command that does so, too.
REMOTE_STARTS = {PBS: ('tm', 'pbs_tmrsh'), LSF: ('lsf', 'blaunch')}


class Start(namedtuple('Start', 'words threads by_mpirun on_this_host')):
    """How the ranks of a job are started.

    Attributes
    ----------
    words : list of str
        What the command begins with.
    threads : int
        Of each rank.
    by_mpirun : bool
        Whether that is mpirun: variables have to be named in its command, so that they reach other hosts.
    on_this_host : bool
        Whether all ranks are.
    """

    def command(self, environment, program):
        """The command that runs Python with these arguments on each rank, in an environment."""
        return self.words + carry(environment) * self.by_mpirun + [sys.executable] + program


def choose_start(ranks, hosts, found):
    """Choose how the ranks of a job are started.

    Parameters
    ----------
    ranks : int or None
        None for the number of tasks of the allocation.
    hosts : str or None
        The option ``--hosts``.
    found : Allocation or None

    Returns
    -------
    Start

    Raises
    ------
    MgpuError
        If there is no way, or the allocation has fewer processors or slots than ranks.
    """
    if found is None:
        return _without_scheduler(ranks, hosts)
    if hosts:
        raise MgpuError('--hosts %s: the hosts of this job are those of its allocation (%s). Leave --hosts out; to use '
                        'some of them, ask the scheduler for fewer' % (hosts, found))
    ranks = ranks or sum(found.tasks)
    if found.scheduler == SLURM:
        kind = slurm_type()
        if kind:
            return _by_srun(ranks, found, kind)
    return _by_scheduled_mpirun(ranks, found)


def _without_scheduler(ranks, text):
    if ranks is None:
        raise MgpuError('give the number of processes, -n N. Only in an allocation of Slurm, PBS or LSF, and in an '
                        'MPIJob, is there a default: its number of tasks. No variable tells of one here: '
                        'SLURM_JOB_ID, PBS_NODEFILE, LSB_JOBID, ' + DEFAULT_HOSTFILE)
    hosts = parse_hosts(text, ranks)
    per_host = max(hosts.values()) if hosts else ranks
    words = [find_mpirun()] + mpirun_options(ranks, hosts, per_host)
    return Start(words, share_of(len(os.sched_getaffinity(0)), per_host), True, not hosts)


def _check_room(ranks, room, found):
    if ranks > room:
        raise MgpuError('-n %d: the allocation (%s) has room for %d processes. Ask the scheduler for more tasks (in '
                        'Slurm --ntasks=%d), or leave -n out' % (ranks, found, room, ranks))


def slurm_type():
    """What ``srun --mpi`` has to name here, or None if Slurm and the library of mpi4py cannot talk."""
    if not shutil.which('srun'):
        return None
    offered = subprocess.run(['srun', '--mpi=list'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, universal_newlines=True, check=False).stdout
    return mpi_library.type_for_srun(mpi_library.loaded(), offered)


def _by_srun(ranks, found, kind):
    _check_room(ranks, max(sum(found.tasks), sum(found.cpus)), found)
    nodes = min(ranks, len(found.tasks))
    per_host = max(found.tasks) if ranks == sum(found.tasks) else -(-ranks // nodes)
    threads = _threads(ranks, found, per_host, 1)
    # --unbuffered: else srun passes on whole lines only, and progress bars stand still. --quiet: only its errors.
    return Start([shutil.which('srun'), '--mpi=' + kind, '--nodes=%d' % nodes, '--ntasks=%d' % ranks,
                  '--cpus-per-task=%d' % threads, '--export=ALL', '--kill-on-bad-exit=1', '--quit-on-interrupt',
                  '--unbuffered', '--quiet'], threads, False, False)


def _by_scheduled_mpirun(ranks, found):
    """By mpirun, which starts its daemons as the scheduler wants it: not by ssh."""
    _check_room(ranks, sum(found.tasks), found)
    per_host = min(ranks, max(found.tasks))
    mpirun = find_mpirun()
    # The cores of this host say nothing about those of the others, and a host may be shared with other jobs.
    daemons = _daemons(found, mpirun)
    words = [mpirun] + ranks_option(ranks) + daemons + keepalive() + ['--bind-to', 'none']
    threads = _threads(ranks, found, per_host, len(os.sched_getaffinity(0)))
    return Start(words, threads, True, any(word.startswith('localhost:') for word in daemons))


def _threads(ranks, found, per_host, cores):
    """Threads of each rank: as the user has asked the scheduler, or a share of a host's processors, or of `cores`."""
    if found.cpus_per_task and ranks == sum(found.tasks):
        return found.cpus_per_task
    return share_of(min(found.cpus or [cores]), per_host)


def _daemons(found, mpirun):
    """Options by which mpirun finds the hosts and starts its daemons there."""
    if found.scheduler == HOSTFILE:
        return []  # it reads the file; who wrote it has set up ssh
    if found.scheduler == SLURM:
        if shutil.which('srun'):
            return ['--mca', 'plm', 'slurm']
        agent, lacks = None, 'srun is not on PATH'
        advice = 'In a container, have srun start the container: srun --mpi=pmix CONTAINER python SCRIPT'
    else:
        component, agent = REMOTE_STARTS[found.scheduler]
        if mpi_library.has_component(mpi_library.components(mpirun), 'plm', component):
            return ['--mca', 'plm', component]
        lacks = "this Open MPI was built without %s's component %s, and %s is not on PATH" \
            % (found.scheduler, component, agent)
        advice = 'Load an Open MPI that was built for ' + found.scheduler
    if len(found.tasks) == 1:
        # Slurm's name of this host may be another one, and mpirun would find no room on localhost.
        return ['--host', 'localhost:%d' % found.tasks[0]] + ['--mca', 'ras', '^slurm'] * (found.scheduler == SLURM)
    if agent and shutil.which(agent):
        slots = ','.join('%s:%d' % pair for pair in zip(found.hosts.split(','), found.tasks))
        return ['--host', slots, '--mca', 'plm', 'rsh', '--mca', 'plm_rsh_agent', agent]
    raise MissingError('%s cannot start processes on the hosts of this allocation (%s): %s. %s, or take one host'
                    % (mpirun, found, lacks, advice))


def starting_environment():
    """The environment of this process, so that mpirun or srun can start from it."""
    environment = dict(os.environ)
    # A process that has initialised MPI without mpirun, such as a notebook with mpi4py, sets this for its children.
    # With it, mpirun exits at once, without a message.
    if environment.get('OMPI_MCA_ess') == 'singleton':
        del environment['OMPI_MCA_ess']
    if mpi_environment.in_slurm_step():
        environment['SLURM_OVERLAP'] = '1'  # the step of srun --pty has the job's processors, and would not lend them
    return environment


def share_of(cores, ranks):
    """Threads of each of the ranks on a host."""
    return max(1, cores // ranks)


def find_mpirun():
    """Return the path of Open MPI's mpirun; raise a MissingError if there is none."""
    path = shutil.which('mpirun')
    remedy = 'Debian: apt-get install openmpi-bin python3-mpi4py'
    if path is None:
        raise MissingError('mpirun, which starts the processes, is not on PATH. ' + remedy)
    version = subprocess.run([path, '--version'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, universal_newlines=True, check=False).stdout
    if 'Open MPI' not in version:
        raise MissingError("%s is not Open MPI's (%s). %s; or start the script with your own: mpirun -n N python SCRIPT"
                        % (path, version.strip().partition('\n')[0], remedy))
    return path


def parse_hosts(text, ranks):
    """Hosts and their numbers of ranks.

    Parameters
    ----------
    text : str or None
        ``a,b`` or ``a:3,b:1``.
    ranks : int

    Returns
    -------
    dict of str to int
        Empty for None.

    Raises
    ------
    MgpuError
        If a host is malformed or named twice, or the numbers do not add up to `ranks`.

    Examples
    --------
    >>> parse_hosts('a,b', 3)
    {'a': 2, 'b': 1}
    """
    if text is None:
        return {}
    names = [entry.strip().partition(':') for entry in text.split(',')]
    given = [number for _, colon, number in names if colon]
    if not all(is_host(name) for name, _, _ in names) or len({name for name, _, _ in names}) < len(names) \
            or len(given) not in (0, len(names)) or None in [whole_number(number, 1) for number in given]:
        raise MgpuError('--hosts %s: name each host once, e.g. a,b, or each with its number of processes, a:3,b:1'
                        % bare(text))
    share, extra = divmod(ranks, len(names))
    hosts = {name: int(number) if number else share + (i < extra) for i, (name, _, number) in enumerate(names)}
    if sum(hosts.values()) != ranks or not all(hosts.values()):
        raise MgpuError('--hosts %s has room for %d processes, but -n asks for %d: each host runs at least one'
                        % (bare(text), sum(hosts.values()), ranks))
    return hosts


def ranks_option(ranks):
    """Options of mpirun for the number of ranks, and the permission to run as root."""
    # Root is usual in a container.
    return ['-n', str(ranks)] + ['--allow-run-as-root'] * (os.geteuid() == 0)


def keepalive():
    """Options of mpirun that notice a lost host."""
    return [word for name, seconds in KEEPALIVE.items() for word in ('--mca', name, str(seconds))]


def mpirun_options(ranks, hosts, per_host):
    """Options of Open MPI's mpirun without a scheduler: how many ranks, where, and on which cores."""
    if hosts:
        where = ['--host', ','.join('%s:%d' % pair for pair in hosts.items())] + keepalive()
    else:
        where = ['--host', 'localhost:%d' % ranks]
    return ranks_option(ranks) + where + binding(len(os.sched_getaffinity(0)), os.cpu_count(), per_host)


def binding(usable, cores, per_host):
    """Options that bind each rank to its share of the cores.

    Examples
    --------
    >>> binding(8, 8, 2)
    ['--use-hwthread-cpus', '--map-by', 'slot:PE=4', '--bind-to', 'hwthread']
    >>> binding(1, 8, 2), binding(2, 2, 4)
    (['--bind-to', 'none'], ['--bind-to', 'none'])
    """
    if usable < cores or per_host > cores:  # mpirun would bind to cores that this process may not use, or refuse
        return ['--bind-to', 'none']
    return ['--use-hwthread-cpus', '--map-by', 'slot:PE=%d' % (cores // per_host), '--bind-to', 'hwthread']


def carry(environment):
    """Options of mpirun that pass these variables on to other hosts.

    mpirun itself may have a descriptor for its own messages that the ranks do not have: they write theirs to stderr.
    """
    names = [name for name in CARRIED + THREADS if name in environment] + [OWN_DESCRIPTOR + '=2']
    return [word for name in names for word in ('-x', name)]
