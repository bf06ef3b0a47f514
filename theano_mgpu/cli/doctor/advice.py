"""Advice on the next steps: the last line of `theano-mgpu doctor`, and the commands of `theano-mgpu` alone."""
from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Sequence, Tuple

from ...comm.allocation import allocation
from ...devices import discovery
from ...devices.contexts import flagged
from ...utils import mpi_environment
from ...utils.command_line import called
from ...utils.flag_text import theanorc_files
from ...utils.tables import counted
from . import device_checks
from .host_checks import FAIL, WARN, Finding, Setup

Step = Tuple[str, str]  # a command to type next, and its purpose


def problem(setup: Setup) -> str:
    """Return the known problem of this machine as it is set up; the empty string if there is none."""
    if setup.theano_error is not None:
        return 'Theano cannot be imported'
    if setup.map_error is not None:
        return 'the contexts cannot be read'
    if device_checks.nvidia_gpu_present() and not discovery.discover('cuda')[0]:
        return "NVIDIA's GPUs cannot be used yet"
    return ''


def first_script(setup: Setup) -> Step:
    """Return the command that runs a script on all that this machine, or this job, has."""
    script = 'a Keras or Theano script, unchanged, '
    processes = mpi_environment.size()
    if processes > 1:
        return 'theano-mgpu run train.py', script + 'started as this was, in %d processes' % processes
    if allocation():
        return 'theano-mgpu launch run train.py', script + 'on the hosts of this job'
    if not setup.needs('cuda', 'opencl'):
        return 'theano-mgpu run train.py', script + 'on ' + counted(len(setup.contexts), 'core') + ' of the CPU'
    if len(setup.contexts) == 1:
        has_mpi = importlib.util.find_spec('mpi4py') is not None and shutil.which('mpirun') is not None
        needs = '' if has_mpi else ', once mpi4py and mpirun are installed'
        return 'theano-mgpu launch --hosts a,b run train.py', script + 'on one device of each of two hosts' + needs
    return 'theano-mgpu run train.py', script + 'on ' + ', '.join(context.name for context in setup.contexts)


def next_steps(setup: Setup) -> list[Step]:
    """Return three commands that make sense next."""
    wrong = problem(setup)
    check = ('theano-mgpu doctor', 'begin here: ' + wrong if wrong else 'check that each context computes')
    if setup.needs('cuda', 'opencl') and not flagged():
        last = ('theano-mgpu config --write', 'use these devices, with float32, from now on')
        if any(map(os.path.exists, theanorc_files())):
            last = ('theano-mgpu config', 'lines for your .theanorc: these devices, with float32')
    else:
        last = ('theano-mgpu bench --model cnn', 'measure how a model scales here')
    return [(_as_called(command), text) for command, text in (check, first_script(setup), last)]


def _as_called(command):
    return command.replace('theano-mgpu', called(), 1)


def last_line(findings: Sequence[tuple[str, Finding]], setup: Setup) -> str:
    """Return one line of advice, after all checks; `findings` are pairs of a name and a Finding."""
    for status, text in (FAIL, 'apply the remedy of %s first, then run theano-mgpu doctor again'), (
            WARN, 'apply the remedy of %s, unless you do not need it'):
        names = [name for name, finding in findings if finding.status == status]
        if names:
            return 'Advice: %s.' % _as_called(text % names[0])
    command, text = first_script(setup)
    return 'Advice: %s runs %s.' % (_as_called(command), text)
