"""`theano-mgpu run --processes`: how many processes run a script, and their command.

Contexts on the CPU compute one at a time in a process, since Python launches them in turn under its lock. So
`--processes auto` starts a process for each of them, as long as there are cores. GPUs compute while the next one is
launched: one process launches for all of them.
"""
from __future__ import annotations

import argparse
import importlib.util
import os

from ..comm import mpi_library
from ..comm.allocation import allocation
from ..devices.context_map import describe
from ..devices.contexts import choose_contexts
from ..errors import MgpuError, MissingError
from ..utils import mpi_environment
from ..utils.flags import environment_flags, set_environment_flags
from .config import devices
from .job_command import COMMAND, choose_start, find_mpirun, rank_environment
from .output import note
from .supervise import run_with_restarts

AUTO = 'auto'


def processes(text: str) -> int | str:
    """Return the value of the option ``--processes``: a number, or `AUTO`."""
    return AUTO if text == AUTO else devices(text)


def decide(args: argparse.Namespace) -> tuple[int, str]:
    """Return the number of processes for ``--processes auto``, and the reason; no device is opened."""
    job = allocation()
    if job is not None:
        return 1, 'this is a job of %s, whose processes launch starts' % job.scheduler
    if args.verify:
        return 1, '--verify compares one device with the contexts of one process'
    contexts = args.contexts or choose_contexts(args.gpus)
    if len(contexts) == 1:
        return 1, 'there is one context'
    if any(context.kind != 'cpu' for context in contexts):
        return 1, 'it launches for all GPUs'
    n = min(len(contexts), len(os.sched_getaffinity(0)))
    if n == 1:
        return 1, 'there is one core'
    try:
        check_mpi()
    except MissingError as error:
        return 1, '%d would be faster, but %s' % (n, error)
    if args.gpus:  # so that the processes do not look for them again, and tell about it
        set_environment_flags({**environment_flags(), 'contexts': describe(contexts)})
    return n, 'Python computes one context on the CPU at a time'


def check_mpi() -> None:
    """Raise a MissingError unless processes can be started."""
    find_mpirun()
    if importlib.util.find_spec('mpi4py') is None:
        raise MissingError(mpi_library.missing('mpi4py is not installed'))


def number_of(args: argparse.Namespace) -> int:
    """Return the number of processes to start, and tell the user why; 1 for this one.

    Raises an MgpuError where they cannot be started, and in one of another number of processes.
    """
    launcher, size = mpi_environment.launcher(), mpi_environment.size()
    if launcher and size > 1:
        if args.processes in (AUTO, size):
            return 1
        raise MgpuError('this is one of %d processes that %s has started: leave --processes out'
                        % (size, launcher.name))
    if args.processes != AUTO:
        if args.processes > 1 and allocation() is None:
            check_mpi()
        return args.processes
    n, reason = decide(args)
    if not args.quiet:
        note('--processes auto: %s: %s' % ('one process' if n == 1 else '%d processes' % n, reason))
    return n


def start(ranks: int, args: argparse.Namespace) -> int:
    """Run the script in several processes, as ``theano-mgpu launch -n N run SCRIPT`` does; return the exit code."""
    how = choose_start(ranks, None, allocation())
    return run_with_restarts(how, rank_environment(how), [COMMAND, *args.words], 0)
