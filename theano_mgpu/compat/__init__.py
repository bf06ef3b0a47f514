"""Theano 1.0.5, and any Keras of its time, on the Python and the libraries of today; it knows of one device.

`patches` lists each change with its reason. `before_theano` and `import_theano`, in this order, apply them all, and the
tables of other rooms as well; those apply the rest of theirs themselves, by `patch.apply`.
"""
from __future__ import annotations

import importlib.machinery
import os
import sys
from typing import Sequence

from ..errors import MgpuError
from ..utils import flag_text
from ..utils.attributes import collector_paused
from ..utils.installed import installed
from .patch import AFTER_THEANO, AS_FLAGS, BEFORE_THEANO, AtImport, Patch, apply
from .patches import PATCHES

__all__ = ['PATCHES', 'before_theano', 'import_theano']


def check_fork() -> None:
    """Raise an MgpuError if Theano-PyMC is installed in place of Theano, or over it."""
    fork, found = installed('Theano-PyMC'), importlib.machinery.PathFinder.find_spec('theano')
    has_files = found is not None and os.path.isdir(os.path.join(os.path.dirname(found.origin or ''), 'graph'))
    if fork and (has_files or not installed('Theano')):
        raise MgpuError('Theano-PyMC %s is installed in place of Theano 1.0.5, or over it; theano_mgpu runs PyMC3 with '
                        'Theano 1.0.5, too: pip uninstall -y Theano-PyMC Theano, then pip install --no-deps '
                        'Theano==1.0.5' % fork)


def before_theano(*tables: Sequence[Patch]) -> None:
    """Apply the patches of this and of other tables that have to come before Theano and Keras are imported."""
    for table in (PATCHES, *tables):
        apply(table, BEFORE_THEANO)
        apply(table, AtImport)


def import_theano(*tables: Sequence[Patch]) -> None:
    """Import Theano with flags that it can be imported with, and apply the patches of this and of other tables to it.

    Where a script has imported Theano before theano_mgpu, Theano has read its flags by itself.

    Raises
    ------
    MgpuError
        If Theano-PyMC is installed in its place, a flag cannot be read, Theano can write no compiled code, or one of
        theano_mgpu's own flags has a value that it cannot have.
    """
    check_fork()
    if 'theano' not in sys.modules:
        _import_with_flags((PATCHES, *tables))
    for table in (PATCHES, *tables):
        apply(table, AFTER_THEANO)


def _import_with_flags(tables):
    users = os.environ.get('THEANO_FLAGS')
    changed = flag_text.parse_flags(users or '')
    for table in tables:
        apply(table, AS_FLAGS, changed, again=True)
    flag_text.set_environment_flags(changed)
    try:
        with collector_paused():
            import theano  # noqa: F401
    except ValueError as error:  # for example, a home directory cannot be written
        if 'compiledir directory' not in str(error):
            raise
        raise MgpuError('Theano has no folder for compiled code: %s Name another one: '
                        'THEANO_FLAGS=base_compiledir=/path/to/folder' % error) from error
    finally:
        if users is None:
            del os.environ['THEANO_FLAGS']
        else:
            os.environ['THEANO_FLAGS'] = users
