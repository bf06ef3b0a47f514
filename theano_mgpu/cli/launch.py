"""`theano-mgpu launch`: run a script as several processes with Open MPI's mpirun."""
import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys

from .. import config
from ..errors import MgpuError
from ..jobs import mpi_environment
from .config import positive
from .program import add_program, check_program
from .supervise import own_folder, run_with_restarts

# Environment variables that processes on other hosts need; mpirun itself passes on OMPI_* only.
CARRIED = ('THEANO_FLAGS', 'THEANORC', 'PYTHONPATH', 'PYTHONHASHSEED', 'KERAS_BACKEND', 'KERAS_HOME', 'POCL_DEVICES',
           'LD_LIBRARY_PATH', 'CUDA_HOME', mpi_environment.QUIET)
# A lost host is noticed within 10 seconds; with Open MPI's defaults it takes 8 minutes.
KEEPALIVE = {'oob_tcp_keepalive_time': 3, 'oob_tcp_keepalive_intvl': 1, 'oob_tcp_keepalive_probes': 3}
THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')

EPILOG = """\
Each process (a rank) takes its share of the contexts in THEANO_FLAGS or .theanorc, or of the host's GPUs in
order; `cpu` ranks share the cores. A script that uses theano_mgpu needs no change: every rank is given the same
batches and computes its part, and the result is that of one process. For a plain Keras or Theano script put the
word run before its name. Only rank 0 prints, saves and shows progress; other ranks print only when they fail. A
failure on one rank ends all of them.

With --sharded each rank feeds its own data; a script selects its part by mgpu.rank() and mgpu.size(). That is for
mgpu.function, mgpu.training_function and Keras models; a plain Theano function is not divided then.
With --restarts a script that ends with an error starts again. It resumes from its last checkpoint if it calls
step.checkpoint(file, every=k), or fits with the callback theano_mgpu.keras.Checkpoint(file, every=k). It does not
start again after SIGTERM, SIGINT or SIGHUP, which end the job, nor if a restart failed before its first step.

mpirun's own settings apply (OMPI_MCA_* in the environment). Other hosts need the same paths, and ssh without a
password. `mpirun -n N python SCRIPT` works too; then every rank prints.

examples:
  theano-mgpu launch -n 2 train.py --epochs 5
  theano-mgpu launch -n 2 run script.py           a plain Keras or Theano script, see run --help
  theano-mgpu launch -n 2 -m package.train
  theano-mgpu launch -n 8 --hosts node1,node2 train.py
  theano-mgpu launch -n 4 --gpus-per-process 2 train.py
  theano-mgpu launch -n 2 --restarts 3 train.py
"""


def add_parser(sub):
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('launch', help='run a script as several processes, on one or more hosts', epilog=EPILOG,
                            usage='theano-mgpu launch -n N [options] SCRIPT|-m MODULE [ARGS]',
                            description='Run a Python script as several processes that train one model.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-n', '--ranks', type=positive, required=True, metavar='N', help='number of processes')
    parser.add_argument('--hosts', metavar='A,B', help='hosts to divide them among, in equal parts, or as in A:3,B:1 '
                        '(default: this host)')
    parser.add_argument('--gpus-per-process', type=positive, metavar='K',
                        help="contexts that each process takes (default: an equal share of its host's)")
    parser.add_argument('--sharded', action='store_true', help='each process feeds its own part of the data')
    parser.add_argument('--timeout', type=positive, metavar='S', help='seconds that a process waits for another one '
                        'in a step before that is an error (default: %d)' % config.OWN_FLAGS['mgpu.timeout'][0])
    parser.add_argument('--restarts', type=int, default=0, metavar='R',
                        help='how many times to start again after an error (default: %(default)s)')
    parser.add_argument('--dry-run', action='store_true', help='print the command without running it')
    add_program(parser, 'a Python script; or the word run, then what "theano-mgpu run" takes')
    parser.set_defaults(run=run, works_without_theano=True)


def run(args):
    """Run the script, with restarts if asked for; return mpirun's exit code."""
    program = program_of(args)
    if args.restarts < 0:
        raise MgpuError('--restarts %d: give 0 or more' % args.restarts)
    hosts = parse_hosts(args.hosts, args.ranks)
    per_host = max(hosts.values()) if hosts else args.ranks
    command = [find_mpirun()] + mpirun_options(args.ranks, hosts, per_host)
    environment = rank_environment(args, per_host)
    command += carry(environment) + [sys.executable] + program
    if args.dry_run:
        print(' '.join('%s=%s' % (name, environment[name]) for name in changed(environment)))
        print(shlex.join(command))
        return 0
    # On other hosts the folder would have to be there, too.
    with contextlib.nullcontext(environment) if hosts else own_folder(environment) as environment:
        return run_with_restarts(command, environment, args.restarts)


def program_of(args):
    """Python's arguments in each process: a module, a script, or a script under `theano-mgpu run`."""
    check_program(args)
    if args.module:
        return ['-m'] + args.module
    if os.path.isfile(args.script):
        return [args.script] + args.args
    if args.script == 'run':
        return ['-m', 'theano_mgpu', 'run'] + args.args
    raise MgpuError('there is no script %s; give the path of a Python file, then its arguments' % args.script)


def find_mpirun():
    """Path of Open MPI's mpirun; a MgpuError if there is none."""
    path = shutil.which('mpirun')
    remedy = 'Debian: apt-get install openmpi-bin python3-mpi4py'
    if path is None:
        raise MgpuError('mpirun, which starts the processes, is not on PATH. ' + remedy)
    version = subprocess.run([path, '--version'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, universal_newlines=True, check=False).stdout
    if 'Open MPI' not in version:
        raise MgpuError("%s is not Open MPI's (%s). %s; or start the script with your own: mpirun -n N python SCRIPT"
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
    given = [number for _, _, number in names if number]
    if not all(name for name, _, _ in names) or len({name for name, _, _ in names}) < len(names) \
            or len(given) not in (0, len(names)) or not all(number.isdecimal() and int(number) for number in given):
        raise MgpuError('--hosts %s: name each host once, e.g. a,b, or each with its number of processes, a:3,b:1'
                        % text)
    share, extra = divmod(ranks, len(names))
    hosts = {name: int(number) if number else share + (i < extra) for i, (name, _, number) in enumerate(names)}
    if sum(hosts.values()) != ranks or not all(hosts.values()):
        raise MgpuError('--hosts %s has room for %d processes, but -n asks for %d: each host runs at least one'
                        % (text, sum(hosts.values()), ranks))
    return hosts


def mpirun_options(ranks, hosts, per_host):
    """Options of Open MPI's mpirun: how many ranks, where, and on which cores."""
    options = ['-n', str(ranks)]
    if os.geteuid() == 0:
        options.append('--allow-run-as-root')  # usual in a container
    if hosts:
        options += ['--host', ','.join('%s:%d' % pair for pair in hosts.items())]
        for name, seconds in KEEPALIVE.items():
            options += ['--mca', name, str(seconds)]
    else:
        options += ['--host', 'localhost:%d' % ranks]
    return options + binding(len(os.sched_getaffinity(0)), os.cpu_count(), per_host)


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


def rank_environment(args, per_host):
    """The environment of the ranks: flags of theano_mgpu, numbers of threads, and settings that keep them alike."""
    environment = dict(os.environ)
    # A process that has initialised MPI without mpirun, such as a notebook with mpi4py, sets this for its children.
    # With it, mpirun exits at once, without a message.
    if environment.get('OMPI_MCA_ess') == 'singleton':
        del environment['OMPI_MCA_ess']
    flags = config.environment_flags()
    flags['mgpu.executor'] = 'mpi'
    if args.gpus_per_process:
        flags['mgpu.gpus_per_process'] = str(args.gpus_per_process)
    if args.sharded:
        flags['mgpu.data'] = 'sharded'
    if args.timeout:
        flags['mgpu.timeout'] = str(args.timeout)
    environment['THEANO_FLAGS'] = config.join_flags(flags)
    if config.own_flag('mgpu.overlap') == 'True':
        # The thread that exchanges gradients would take half of the core that computes the next ones.
        environment.setdefault('OMPI_MCA_mpi_yield_when_idle', '1')
    threads = str(max(1, len(os.sched_getaffinity(0)) // per_host))
    for name in THREADS:
        environment.setdefault(name, threads)
    environment.setdefault('PYTHONHASHSEED', '0')  # the same order of sets, hence of ops, and the same rounding
    environment[mpi_environment.QUIET] = '1'
    return environment


def changed(environment):
    """Names of the variables that differ from this process's environment."""
    return sorted(name for name, value in environment.items() if os.environ.get(name) != value)


def carry(environment):
    """Options of mpirun that pass these variables on to other hosts."""
    return [word for name in CARRIED + THREADS if name in environment for word in ('-x', name)]
