"""`theano-mgpu` without arguments: the devices and packages of this machine, and three commands to run next."""
from __future__ import annotations

import sys

import theano_mgpu

from ..comm.allocation import allocation
from ..devices import discovery
from ..utils import processor
from ..utils.command_line import called
from ..utils.installed import installed
from ..utils.tables import counted
from .doctor import advice, host_checks
from .doctor.device_checks import with_type

PACKAGES = ('Theano', 'pygpu', 'Keras', 'mpi4py')


def show() -> None:
    """Print the overview; nothing is opened or computed, so that it takes no longer than importing Theano."""
    setup = host_checks.Setup()
    lines = [('devices', devices()), ('contexts', host_checks.check_map(setup).text), ('installed', packages())]
    job = allocation()
    if job:
        lines.append(('job', str(job)))
    print('theano-mgpu %s: one Theano or Keras model on several devices\n' % theano_mgpu.__version__)
    print('\n'.join('  %-10s  %s' % line for line in lines))
    steps = advice.next_steps(setup)
    width = max(len(command) for command, _ in steps)
    print('\nnext:')
    print('\n'.join('  %-*s  %s' % (width, *step) for step in steps))
    print('\n%s --help lists all commands.' % called())


def devices() -> str:
    """Return the devices of this machine, as text."""
    texts = discovery.discover('cuda')[0] + [with_type(device) for device in discovery.discover('opencl')[0]]
    return ', '.join(texts + ['cpu (%s)' % counted(processor.cores(), 'core')])


def packages() -> str:
    """Return Python and the packages that this one works with, as text."""
    texts = ['Python %d.%d.%d' % sys.version_info[:3]]
    for package in PACKAGES:
        version = installed(package)
        texts.append('%s %s' % (package, version) if version else 'no ' + package)
    return ', '.join(texts)
