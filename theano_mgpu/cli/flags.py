"""`theano-mgpu flags`: list the package's own flags, with their values here and all possible ones.

They are Theano flags: set them in THEANO_FLAGS (THEANO_FLAGS=mgpu.verify=True), or in the section [mgpu] of .theanorc.
docs/guide/contexts.md says where each is described.

examples:
  theano-mgpu flags
  THEANO_FLAGS=mgpu.timeout=60 theano-mgpu flags
"""
from __future__ import annotations

import argparse

from ..utils.flag_text import OWN_FLAGS, check_own_names, own_flag, values_of
from ..utils.tables import table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.set_defaults(works_without_theano=True)


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit code is 0. Raise an MgpuError for a flag that is set and does not exist."""
    rows = [[name, str(own_flag(name)) or '-', str(OWN_FLAGS[name][0]) or '-', values_of(name)] for name in OWN_FLAGS]
    print(table([['FLAG', 'VALUE', 'DEFAULT', 'VALUES'], *rows]))
    check_own_names()
    return 0
