"""The command that starts the ranks of a job: Open MPI's mpirun, or srun in an allocation of Slurm."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
from typing import Mapping, NamedTuple

from ..comm import mpi_library
from ..comm.allocation import DEFAULT_HOSTFILE, HOSTFILE, SLURM, Allocation
from ..errors import MgpuError, MissingError
from ..parsing import bare, is_host, whole_number
from ..utils import blas, mpi_environment, processor, progress
from ..utils.flag_text import environment_flags, flag, join_flags, own_flag
from .launcher_output import OWN_DESCRIPTOR

COMMAND = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), '__main__.py')
# Environment variables that processes on other hosts need; mpirun itself passes on OMPI_* only.
CARRIED = ('THEANO_FLAGS', 'THEANORC', 'PYTHONPATH', 'PYTHONHASHSEED', 'PYTHONSAFEPATH', 'KERAS_BACKEND', 'KERAS_HOME',
           'POCL_DEVICES', 'LD_LIBRARY_PATH', 'CUDA_HOME', mpi_environment.QUIET, mpi_environment.REPORTS,
           mpi_environment.SEED, blas.VARIABLE, blas.OWN)
# A lost host is noticed within 10 seconds; with Open MPI's defaults it takes 8 minutes.
KEEPALIVE = ['--mca', 'oob_tcp_keepalive_time', '3', '--mca', 'oob_tcp_keepalive_intvl', '1',
             '--mca', 'oob_tcp_keepalive_probes', '3']
THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')


class Start(NamedTuple):
    """The way in which the ranks of a job are started: the beginning of the command, and the threads of each rank.

    Variables have to be named in the command of mpirun, so that they reach other hosts. `on_this_host` tells that all
    ranks are there.
    """

    words: list[str]
    threads: int
    by_mpirun: bool
    on_this_host: bool

    def command(self, environment: dict[str, str], program: list[str]) -> list[str]:
        """Return the command that runs Python with these arguments on each rank, in an environment."""
        return self.words + carry(environment) * self.by_mpirun + [sys.executable] + program


def choose_start(ranks: int | None, hosts: str | None, allocation: Allocation | None) -> Start:
    """Choose how the ranks of a job are started: by default, as many as the allocation has tasks.

    Raises an MgpuError if there is no way, or the allocation has fewer processors or slots than ranks.
    """
    if allocation is None:
        return _without_scheduler(ranks, hosts)
    if hosts:
        raise MgpuError('--hosts %s: the hosts of this job are those of its allocation (%s). Leave --hosts out; to use '
                        'some of them, ask the scheduler for fewer' % (hosts, allocation))
    ranks = ranks or sum(allocation.tasks)
    kind = slurm_type() if allocation.scheduler == SLURM else None
    room = max(sum(allocation.tasks), sum(allocation.cpus) if kind else 0)
    if ranks > room:
        raise MgpuError('-n %d: the allocation (%s) has room for %d processes. Ask the scheduler for more tasks (in '
                        'Slurm --ntasks=%d), or leave -n out' % (ranks, allocation, room, ranks))
    if kind:
        return _by_srun(ranks, allocation, kind)
    return _by_scheduled_mpirun(ranks, allocation)


def _without_scheduler(ranks, text):
    if ranks is None:
        raise MgpuError('give the number of processes, -n N. Only in an allocation of Slurm, and in an MPIJob, is '
                        'there a default: its number of tasks. No variable tells of one here: SLURM_JOB_ID, %s. In a '
                        'job of another scheduler, start its mpirun yourself: mpirun -n N python SCRIPT'
                        % DEFAULT_HOSTFILE)
    hosts = parse_hosts(text, ranks) if text is not None else {'localhost': ranks}
    per_host = max(hosts.values())
    slots = ','.join('%s:%d' % (_by_name(host), n) for host, n in hosts.items())
    words = [find_mpirun()] + ranks_option(ranks) + ['--host', slots] + KEEPALIVE * (text is not None)
    usable = len(processor.usable())
    words += binding(usable, os.cpu_count() or usable, per_host)
    return Start(words, max(1, usable // per_host), True, text is None)


def slurm_type() -> str | None:
    """Return the type that ``srun --mpi`` has to name here; None if Slurm and the library of mpi4py cannot talk."""
    if not shutil.which('srun'):
        return None
    return mpi_library.type_for_srun(mpi_library.loaded(), mpi_library.output_of('srun', '--mpi=list'))


def _by_srun(ranks, allocation, kind):
    nodes = min(ranks, len(allocation.tasks))
    per_host = max(allocation.tasks) if ranks == sum(allocation.tasks) else -(-ranks // nodes)
    threads = _threads(ranks, allocation, per_host, 1)
    # --unbuffered: else srun passes on whole lines only, and progress bars stand still. --quiet: only its errors.
    return Start([shutil.which('srun'), '--mpi=' + kind, '--nodes=%d' % nodes, '--ntasks=%d' % ranks,
                  '--cpus-per-task=%d' % threads, '--export=ALL', '--kill-on-bad-exit=1', '--quit-on-interrupt',
                  '--unbuffered', '--quiet'], threads, False, False)


def _by_scheduled_mpirun(ranks, allocation):
    """Return the start by mpirun, which starts its daemons through the scheduler, not by ssh."""
    per_host = min(ranks, max(allocation.tasks))
    mpirun = find_mpirun()
    # Another host may have more or fewer cores than this one, and a host may be shared with other jobs.
    daemons = _daemons(allocation, mpirun)
    words = [mpirun] + ranks_option(ranks) + daemons + KEEPALIVE + ['--bind-to', 'none']
    threads = _threads(ranks, allocation, per_host, len(processor.usable()))
    return Start(words, threads, True, any(word.startswith('localhost:') for word in daemons))


def _threads(ranks, allocation, per_host, cores):
    """Return the threads of a rank: those that the scheduler was asked for, or a share of a host's processors."""
    if allocation.cpus_per_task and ranks == sum(allocation.tasks):
        return allocation.cpus_per_task
    return max(1, min(allocation.cpus or [cores]) // per_host)


def _by_name(host):
    """Return the name of this host for an address or another name of it: Open MPI 5 finds no slots by those."""
    with contextlib.suppress(OSError):  # of a host that is not this one, bind fails
        for family, kind, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return host if host == 'localhost' else socket.gethostname()
    return host


def _daemons(allocation, mpirun):
    """Return the options by which mpirun finds the hosts and starts its daemons there."""
    if allocation.scheduler == HOSTFILE:
        return ['--hostfile', os.environ[DEFAULT_HOSTFILE]]  # Open MPI 5 does not read it; who wrote it has set up ssh
    if shutil.which('srun'):
        return ['--mca', 'plm', 'slurm']
    if len(allocation.tasks) == 1:
        # Slurm's name of this host may be another one, and mpirun would find no room on localhost.
        return ['--host', 'localhost:%d' % allocation.tasks[0], '--mca', 'ras', '^slurm']
    raise MissingError('%s cannot start processes on the hosts of this allocation (%s): srun is not on PATH. In a '
                       'container, have srun start the container: srun --mpi=pmix CONTAINER python SCRIPT; or take one '
                       'host' % (mpirun, allocation))


def starting_environment() -> dict[str, str]:
    """Return the environment of this process, changed so that mpirun or srun can start from it."""
    environment = dict(os.environ)
    # A process that has initialised MPI without mpirun, such as a notebook with mpi4py, sets this for its children.
    # With it, mpirun exits at once, without a message.
    if environment.get('OMPI_MCA_ess') == 'singleton':
        del environment['OMPI_MCA_ess']
    if mpi_environment.in_slurm_step():
        environment['SLURM_OVERLAP'] = '1'  # the step of srun --pty has the job's processors, and would not lend them
    return environment


def rank_environment(start: Start, settings: Mapping[str, object] = {}) -> dict[str, str]:
    """Return the environment of the ranks: own flags, numbers of threads, and settings that keep the ranks alike.

    `settings` has values of flags, by their names without ``mgpu.``.
    """
    environment = starting_environment()
    flags = dict(environment_flags(), **{'mgpu.executor': 'mpi'})
    flags.update(('mgpu.' + name, str(value)) for name, value in settings.items())
    device = flag('device', 'cpu')
    if device.startswith('cuda'):  # it is the same one for all ranks, each of which would reserve its memory
        flags['device'] = 'cpu'
        progress.note('device=%s is not read in a job of several processes: contexts choose devices' % device)
    environment['THEANO_FLAGS'] = join_flags(flags)
    if own_flag('mgpu.overlap') == 'True':
        # The thread that exchanges gradients would take half of the core that computes the next ones.
        environment.setdefault('OMPI_MCA_mpi_yield_when_idle', '1')
    if start.by_mpirun and start.on_this_host:
        # Open MPI 5.0.7 looks for pairs of IPv6 interfaces that no message takes, and says that there are none.
        environment.setdefault('OMPI_MCA_btl_tcp_disable_family', '6')
    for name in THREADS:
        environment.setdefault(name, str(start.threads))
    if getattr(sys.flags, 'safe_path', False):  # python -P
        environment['PYTHONSAFEPATH'] = '1'
    environment.setdefault('PYTHONHASHSEED', '0')  # the same order of sets, hence of ops, and the same rounding
    environment[mpi_environment.QUIET] = '1'
    return environment


def check_mpi() -> None:
    """Raise a MissingError unless processes can be started."""
    find_mpirun()
    if importlib.util.find_spec('mpi4py') is None:
        raise MissingError(mpi_library.missing('mpi4py is not installed'))


def find_mpirun() -> str:
    """Return the path of Open MPI's mpirun; raise a MissingError if there is none."""
    path = shutil.which('mpirun')
    remedy = 'Debian: apt-get install openmpi-bin python3-mpi4py'
    if path is None:
        raise MissingError('mpirun, which starts the processes, is not on PATH. ' + remedy)
    version = mpi_library.output_of(path, '--version')
    if 'Open MPI' not in version:
        raise MissingError("%s is not Open MPI's (%s). %s; or start the script with your own: mpirun -n N python SCRIPT"
                        % (path, version.strip().partition('\n')[0], remedy))
    return path


def parse_hosts(text: str, ranks: int) -> dict[str, int]:
    """Return hosts, and the number of ranks of each, for a text such as ``a,b`` or ``a:3,b:1``.

    Raises an MgpuError if a host is malformed or named twice, or the numbers do not add up to `ranks`.

    Examples
    --------
    >>> parse_hosts('a,b', 3)
    {'a': 2, 'b': 1}
    """
    entries = [entry.strip().partition(':') for entry in text.split(',')]
    names, numbers = {name for name, _, _ in entries}, [number for _, colon, number in entries if colon]
    if not all(map(is_host, names)) or len(names) < len(entries) or len(numbers) not in (0, len(entries)) \
            or None in [whole_number(number, 1) for number in numbers]:
        raise MgpuError('--hosts %s: name each host once, e.g. a,b, or each with its number of processes, a:3,b:1'
                        % bare(text))
    share, extra = divmod(ranks, len(entries))
    hosts = {name: int(number) if number else share + (i < extra) for i, (name, _, number) in enumerate(entries)}
    if sum(hosts.values()) != ranks or not all(hosts.values()):
        raise MgpuError('--hosts %s has room for %d processes, but -n asks for %d: each host runs at least one'
                        % (bare(text), sum(hosts.values()), ranks))
    return hosts


def ranks_option(ranks: int) -> list[str]:
    """Return mpirun's options for the number of ranks, and for root, who is the usual user of a container."""
    return ['-n', str(ranks)] + ['--allow-run-as-root'] * (os.geteuid() == 0)


def binding(usable: int, cores: int, per_host: int) -> list[str]:
    """Return the options that bind each rank to its share of the cores.

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


def carry(environment: dict[str, str]) -> list[str]:
    """Return the options of mpirun that pass these variables on to other hosts.

    mpirun itself may have a descriptor for its own messages that the ranks do not have: they write theirs to stderr.
    """
    names = [name for name in CARRIED + THREADS if name in environment] + [OWN_DESCRIPTOR + '=2']
    return [word for name in names for word in ('-x', name)]
