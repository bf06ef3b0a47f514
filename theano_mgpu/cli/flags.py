"""`theano-mgpu flags`: list the package's own flags, and their values here.

They are Theano flags: set them in THEANO_FLAGS (THEANO_FLAGS=mgpu.verify=True), or in the section [mgpu] of .theanorc.
With names, it prints what these flags mean.

examples:
  theano-mgpu flags
  theano-mgpu flags mgpu.verify mgpu.check
"""
from __future__ import annotations

import argparse
import textwrap

from ..errors import MgpuError
from ..utils.flags import OWN_FLAGS, own_flag, values_of
from ..utils.tables import table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('names', nargs='*', metavar='FLAG', help='describe this flag')
    parser.set_defaults(works_without_theano=True)


def check(args: argparse.Namespace) -> None:
    """Raise an MgpuError for a flag that is none of the package's."""
    for name in set(args.names) - set(OWN_FLAGS):
        raise MgpuError('there is no flag %s. The flags are: %s' % (name, ', '.join(OWN_FLAGS)))


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit code is 0."""
    rows = [[name, str(own_flag(name)) or '-', str(OWN_FLAGS[name][0]) or '-', values_of(name)]
            for name in args.names or OWN_FLAGS]
    print(table([['FLAG', 'VALUE', 'DEFAULT', 'VALUES']] + rows))
    for name in args.names:
        print('\n%s\n%s' % (name, textwrap.indent(textwrap.fill(OWN_FLAGS[name][2], 100), '  ')))
    return 0
