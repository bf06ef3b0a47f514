"""`theano-mgpu launch`: run a script as several processes, on one or more hosts.

Open MPI's mpirun, or Slurm's srun, starts the processes, which train one model. Each process (a rank) takes its
share of the contexts in THEANO_FLAGS or .theanorc, or of the host's GPUs in order; `cpu` ranks share the cores. A
script that uses theano_mgpu needs no change: every rank is given the same batches and computes its part, and the
result is as from one process. For a plain Keras or Theano script put the word run before its name. Only rank 0
prints, saves and shows progress; other ranks print only when they fail. A failure on one rank ends all of them.

With --sharded each rank feeds its own data; a script selects its part by mgpu.rank() and mgpu.size(). That is for
mgpu.function, mgpu.training_function and Keras models; a plain Theano function is not divided then.
With --restarts a script that ends with an error starts again. It resumes from its last checkpoint if it calls
step.checkpoint(file, every=k), or fits with the callback theano_mgpu.keras.Checkpoint(file, every=k). It does not
start again after SIGTERM, SIGINT, SIGHUP, SIGQUIT or SIGABRT, which end the job, nor if it failed twice in a row
before its first step and rank 0 is on this host. SIGUSR1 and SIGUSR2 are passed on to the processes. With a checkpoint,
SIGTERM and SIGUSR1 end them once the call that runs has ended, and the file is written.
With --spares 1 a second set of processes runs the script up to its first checkpoint, and waits there. After a failure
it continues at once: imports, graphs and compiled code are there. It takes as much memory as the job.
With --min M a job that fails before its first step, as without one of its GPUs, is tried with one process fewer, down
to M. These divide the batches anew, and continue from the checkpoint. After a later failure all are tried again, and
before that when this process gets SIGRTMIN, or when all are ready as spare ones.

In an allocation of Slurm, and in a Kubernetes MPIJob, the processes run on its hosts, and -n is its number of tasks
by default. They are started by srun in Slurm if it and mpi4py's MPI can talk, else by mpirun through the scheduler. In
a job of PBS or LSF, start mpirun yourself. See docs/guide/clusters.md.

mpirun's own settings apply (OMPI_MCA_* in the environment). Other hosts need the same paths, and with --hosts ssh
without a password. `mpirun -n N python SCRIPT` works too; then every rank prints.

examples:
  theano-mgpu launch -n 2 train.py --epochs 5
  theano-mgpu launch -n 2 run script.py           a plain Keras or Theano script, see run --help
  theano-mgpu launch -n 2 predict model.h5 x.npy y.npy
  theano-mgpu launch -n 2 -m package.train
  theano-mgpu launch -n 8 --hosts node1,node2 train.py
  theano-mgpu launch -n 4 --gpus-per-process 2 train.py
  theano-mgpu launch -n 2 --restarts 3 train.py
  theano-mgpu launch -n 2 --restarts 3 --spares 1 train.py
  theano-mgpu launch --min 1 --max 4 --restarts 3 train.py
  sbatch --nodes 2 --ntasks-per-node 4 --wrap "theano-mgpu launch train.py"
  theano-mgpu launch --dry-run train.py           print the command, which begins with srun or mpirun
"""
from __future__ import annotations

import argparse
import os
import shlex

from .. import config
from ..comm.allocation import allocation
from ..devices.contexts import flagged
from ..errors import MgpuError
from ..utils import mpi_environment
from ..utils.files import check_folder
from ..utils.flag_text import OWN_FLAGS, own_flag
from . import predict
from . import run as run_command
from .job_command import CARRIED, COMMAND, choose_start, rank_environment
from .output import add_command, note
from .program import add_ledger, add_program, check_program, check_syntax
from .shared_arguments import add_contexts, devices, positive, use_contexts
from .supervise import run_with_restarts

COMMANDS = {'run': run_command, 'predict': predict}  # which several processes can execute together


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.usage = 'theano-mgpu launch [-n N] [options] SCRIPT|-m MODULE [ARGS]'
    parser.add_argument('-n', '--ranks', '--max', type=devices, metavar='N',
                        help='number of processes (in an allocation by default its number of tasks)')
    parser.add_argument('--min', type=devices, metavar='M', help='fewest processes, for restarts: where a job fails '
                        'before its first step, it is tried with one process fewer (default: N)')
    parser.add_argument('--hosts', metavar='A,B', help='hosts to divide them among, in equal parts, or as in A:3,B:1 '
                        '(default: this host; in an allocation its hosts, always)')
    add_contexts(parser)
    parser.add_argument('--gpus-per-process', type=devices, metavar='K',
                        help="contexts that each process takes (default: an equal share of its host's)")
    parser.add_argument('--sharded', action='store_const', dest='data', const='sharded',
                        help='each process feeds its own part of the data')
    parser.add_argument('--timeout', type=positive, metavar='S', help='seconds that a process waits for another one '
                        'in a step before that is an error (default: %s)' % OWN_FLAGS['mgpu.timeout'][0])
    parser.add_argument('--restarts', type=int, default=0, metavar='R',
                        help='how many times to start again after an error (default: %(default)s)')
    parser.add_argument('--spares', type=int, default=0, metavar='S', help='how many sets of processes to keep ready '
                        'for a restart, each of which takes as much memory as the job (default: %(default)s)')
    add_ledger(parser)
    parser.add_argument('--dry-run', action='store_true', help='print the command without running it')
    add_program(parser, 'a Python script; or the word run or predict, then the arguments of that command')
    parser.set_defaults(works_without_theano=True)


def run(args: argparse.Namespace) -> int:
    """Run the script, with restarts if asked for; return the exit code of the job."""
    program = program_of(args)
    for name in OWN_FLAGS:  # an error in a flag is said once, not by each process
        own_flag(name)
    config.check_together()
    check_restarts(args)
    launcher, size = mpi_environment.launcher(), mpi_environment.size()
    if launcher and size > 1:
        raise MgpuError('this is one of %d processes that %s has started, and launch starts processes itself. Call it '
                        'once, such as in the batch script; or have %s start python %s'
                        % (size, launcher.name, launcher.name, ' '.join(program)))
    start = choose_start(args.ranks, args.hosts, allocation())
    if args.contexts and not (isinstance(args.contexts, str) or flagged() or start.on_this_host):
        raise MgpuError('--gpus chooses among the devices of this host, and the processes run on others, too: give '
                        "their contexts, such as --contexts 'dev0->cuda0;dev1->cuda1'")
    use_contexts(args)
    ledger = args.ledger or own_flag('mgpu.ledger')
    if ledger and start.on_this_host:
        check_folder(ledger)
    settings = {name: getattr(args, name) for name in ('gpus_per_process', 'data', 'timeout', 'ledger')
                if getattr(args, name)}
    environment = rank_environment(start, settings)
    if args.dry_run:
        variables = ['%s=%s' % (name, value) for name, value in sorted(environment.items())
                     if name in CARRIED or os.environ.get(name) != value]
        print(shlex.join(['env', *variables, *start.command(environment, program)]))
        return 0
    if args.spares and not (start.by_mpirun and start.on_this_host):
        note('--spares is for processes that mpirun starts on this host: this job has none, and restarts anew')
        args.spares = 0
    fewer = {}
    for ranks in range(args.ranks - 1, args.min - 1, -1) if args.min else ():
        smaller = choose_start(ranks, None, None)
        fewer[ranks] = smaller, rank_environment(smaller, settings)
    return run_with_restarts(start, environment, program, args.restarts, args.spares, fewer)


def check_restarts(args: argparse.Namespace) -> None:
    """Raise an MgpuError for bad values of the options about restarts."""
    for name in ('restarts', 'spares'):
        if getattr(args, name) < 0:
            raise MgpuError('--%s %d: give 0 or more' % (name, getattr(args, name)))
    for name in ('spares', 'min'):
        if getattr(args, name) and not args.restarts:
            raise MgpuError('--%s %d is for restarts, and there are none: give --restarts R, too'
                            % (name, getattr(args, name)))
    if args.min and (args.hosts or args.ranks is None or allocation() is not None):
        raise MgpuError('--min %d is for processes of one host, outside of a scheduler, whose number -n N or --max N '
                        'gives' % args.min)
    if args.min and args.min > args.ranks:
        raise MgpuError('--min %d is more than the number of processes, %d: give at most that' % (args.min, args.ranks))


def program_of(args: argparse.Namespace) -> list[str]:
    """Return Python's arguments in each process: a module, a script, or one of `COMMANDS` with its arguments."""
    check_program(args)
    if args.module:
        return ['-m'] + args.module
    if args.script in COMMANDS and not os.path.isfile(args.script):
        check_command(args.script, args.args)
        return [COMMAND, args.script] + args.args
    if os.path.isfile(args.script) or os.path.isfile(os.path.join(args.script, '__main__.py')):
        check_syntax(args.script)
        return [args.script] + args.args
    raise MgpuError('there is no script %s; give the path of a Python file, then its arguments' % args.script)


def check_command(name: str, words: list[str]) -> None:
    """End with an error for arguments that a command of `COMMANDS` does not take, rather than in each process."""
    parser = argparse.ArgumentParser(prog='theano-mgpu launch')
    add_command(parser.add_subparsers(), COMMANDS[name])
    args = parser.parse_args([name] + words)
    args.check(args)
    if getattr(args, 'script', None):
        check_syntax(args.script)
