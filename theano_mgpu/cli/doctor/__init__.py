"""`theano-mgpu doctor`: check the set-up; failures come with a remedy.

The compiler, the libraries and every context are checked, each context by a real computation. A check is
ok, FAIL (needed but broken: the exit code is 1), warn (works, but slowly or in part) or skip (absent, and
not needed). Needed are Python, NumPy, Theano, and everything that the configured contexts use; each of
these contexts has to compute something. In an allocation of a cluster, processes are started on its hosts.
As a process of srun or mpirun, the doctor checks whether MPI finds the others.

examples:
  theano-mgpu doctor
  srun --mpi=pmix -n 2 theano-mgpu doctor
  THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1' theano-mgpu doctor
"""
from __future__ import annotations

import argparse
import functools
import textwrap
from typing import Callable, Iterator

from ...utils import mpi_environment
from ..output import print_json
from . import advice, device_checks, host_checks, machine_checks, mpi_checks
from .host_checks import FAIL, SKIP, Finding, Setup

NAME_WIDTH = 14


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.set_defaults(works_without_theano=True)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print each result at once; return 1 if one failed, else 0."""
    setup, findings = Setup(), []
    for name, finding in diagnose(setup):
        findings.append((name, finding))
        if not args.json:
            print(as_text(name, finding), flush=True)
    failed = [name for name, finding in findings if finding.status == FAIL]
    last_line = advice.last_line(findings, setup)
    if args.json:
        print_json({'healthy': not failed, 'advice': last_line,
                    'checks': [dict(name=name, **finding._asdict()) for name, finding in findings]})
    else:
        print('\nBroken: %s.' % ', '.join(failed) if failed else '\nAll that is needed works.')
        print(last_line)
    return 1 if failed else 0


def plan(setup: Setup) -> list[tuple[str, Callable[[Setup], Finding]]]:
    """Return the checks to run, in order: pairs of a name and a function of the set-up."""
    def if_theano(check: Callable[[Setup], Finding]) -> Callable[[Setup], Finding]:
        return check if setup.theano_error is None else lambda setup: Finding(SKIP, 'needs Theano')

    checks = [
        ('Python', host_checks.check_python),
        ('NumPy', host_checks.check_numpy),
        ('Theano', host_checks.check_theano),
        ('compiler', if_theano(host_checks.check_compiler)),
        ('BLAS', if_theano(host_checks.check_blas)),
        ('Keras', if_theano(host_checks.check_keras)),
        ('mpi4py', host_checks.check_mpi),
        ('job', if_theano(mpi_checks.check_job)) if mpi_environment.size() > 1 else ('mpirun', mpi_checks.check_mpirun),
        ('cores', machine_checks.check_cores),
        ('shared memory', machine_checks.check_shared_memory),
        ('limits', machine_checks.check_limits),
        ('contexts', host_checks.check_map),
        ('pygpu', device_checks.check_pygpu),
        ('OpenCL devices', device_checks.check_opencl),
        ('libclblast.so', device_checks.check_clblast),
        ('CUDA devices', device_checks.check_cuda)]
    if device_checks.cuda_is_wanted(setup):
        checks += [(name, functools.partial(device_checks.check_library, name=name))
                   for name in device_checks.CUDA_LIBRARIES]
        checks += [('cards', machine_checks.check_cards),
                   ('architecture', device_checks.check_nvrtc),
                   ('libgpuarray', if_theano(device_checks.check_libgpuarray)),
                   ('libcudnn.so', if_theano(device_checks.check_cudnn))]
    for context in setup.contexts:
        checks.append(('context ' + context.name,
                       if_theano(functools.partial(device_checks.check_context, context=context))))
        if context.kind == 'cuda':
            checks.append(('cuDNN on ' + context.name,
                           if_theano(functools.partial(device_checks.check_convolution, context=context))))
    if sum(context.kind == 'cuda' for context in setup.contexts) > 1:
        checks.append(('copies', if_theano(device_checks.check_copies)))
        checks.append(('collectives', if_theano(device_checks.check_collectives)))
    return checks


def diagnose(setup: Setup) -> Iterator[tuple[str, Finding]]:
    """Run the checks and yield each name and finding; an exception in a check is a finding, too."""
    for name, check in plan(setup):
        try:
            finding = check(setup)
        except Exception as error:  # the remaining checks must run
            finding = Finding(FAIL, '%s: %s' % (type(error).__name__, host_checks.first_line(error)),
                              'This check itself failed: please report it')
        yield name, finding


def as_text(name: str, finding: Finding) -> str:
    """Return a finding as one line, and its remedy below, indented."""
    status = finding.status.upper() if finding.status == FAIL else finding.status
    line = '%-*s  %-4s  %s' % (NAME_WIDTH, name, status, finding.text)
    return line + textwrap.indent('\nremedy: ' + finding.remedy, ' ' * (NAME_WIDTH + 8)) if finding.remedy else line
