"""Advice on the next step: the last line of `theano-mgpu doctor`."""
from __future__ import annotations

import importlib.util
import shutil
from typing import Sequence

from ...comm.allocation import allocation
from ...utils import mpi_environment
from .host_checks import FAIL, WARN, Finding, Setup


def first_script(setup: Setup) -> tuple[str, str]:
    """Return the command that runs a script on all that this machine, or this job, has, and its purpose."""
    script = 'a Keras or Theano script, unchanged, '
    processes = mpi_environment.size()
    if processes > 1:
        return 'theano-mgpu run train.py', script + 'started as this was, in %d processes' % processes
    if allocation():
        return 'theano-mgpu launch run train.py', script + 'on the hosts of this job'
    has_mpi = importlib.util.find_spec('mpi4py') is not None and shutil.which('mpirun') is not None
    needs = '' if has_mpi else ', once mpi4py and mpirun are installed'
    if not setup.needs('cuda', 'opencl'):
        return 'theano-mgpu launch -n 2 run train.py', script + 'in two processes on the CPU' + needs
    if len(setup.contexts) == 1:
        return 'theano-mgpu launch --hosts a,b run train.py', script + 'on one device of each of two hosts' + needs
    return 'theano-mgpu run train.py', script + 'on ' + ', '.join(context.name for context in setup.contexts)


def last_line(findings: Sequence[tuple[str, Finding]], setup: Setup) -> str:
    """Return one line of advice, after all checks; `findings` are pairs of a name and a Finding."""
    for status, text in (FAIL, 'apply the remedy of %s first, then run theano-mgpu doctor again'), (
            WARN, 'apply the remedy of %s, unless you do not need it'):
        names = [name for name, finding in findings if finding.status == status]
        if names:
            return 'Advice: %s.' % (text % names[0])
    return 'Advice: %s runs %s.' % first_script(setup)
