"""Patches of libraries that get no more releases; `table` lists each with its reason.

They are applied from here, once: `before_theano`, `import_theano` and `after_theano`, in this order, when theano_mgpu
is imported; the others with `apply` when a context is opened or a graph is placed, or at the first `enable` or
`multi_gpu_model`.
"""
from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any, List

from .. import config
from ..errors import MgpuError
from ..utils import rank_process
from ..utils.collector import collector_paused
from . import import_hooks, keras_names, table, theano_imports
from .table import EACH_GPU, FIRST_PLACEMENT, PATCHES, WITH_CONTEXTS, WITH_CUDNN

__all__ = ['EACH_GPU', 'FIRST_PLACEMENT', 'PATCHES', 'WITH_CONTEXTS', 'WITH_CUDNN', 'after_theano', 'apply',
           'before_theano', 'import_theano', 'theano_was_first']

theano_was_first = False      # whether Theano was imported before theano_mgpu
_applied: List[table.Patch] = []    # patches that are applied once a process
_applying = threading.RLock()


def apply(when: str, *arguments: Any) -> None:
    """Apply the patches that the table has for a time, with the arguments that it names.

    The patches of `AS_FLAGS` and `EACH_GPU` are applied each time, the others once a process.
    """
    with _applying:
        for patch in PATCHES:
            if patch.when == when and patch not in _applied and patch.is_needed():
                patch.apply(*arguments)
                if when not in (table.AS_FLAGS, EACH_GPU):
                    _applied.append(patch)


def _apply_at_imports(kind, hook):
    """Pass the patches for imports of a kind to a hook, each once a process."""
    for patch in PATCHES:
        if isinstance(patch.when, kind) and patch not in _applied and patch.is_needed():
            for module in patch.when.modules:
                hook(module, patch.apply)
            _applied.append(patch)


def before_theano() -> None:
    """Apply the patches that have to come before Theano and Keras are imported."""
    apply(table.BEFORE_THEANO)
    rank_process.hints.append(keras_names.hint)
    _apply_at_imports(table.DuringImport, import_hooks.during_import)
    _apply_at_imports(table.AfterImport, import_hooks.after_import)


def after_theano() -> None:
    """Patch the imported Theano.

    Raises
    ------
    MgpuError
        If one of theano_mgpu's own flags has a value that it cannot have.
    """
    apply(table.AFTER_THEANO)
    _apply_at_imports(table.BeforeImport, import_hooks.before_import)


def import_theano() -> None:
    """Import Theano with flags that it can be imported with, and with the names hidden that it must not see.

    Where a script has imported Theano before theano_mgpu, Theano has read its flags by itself, and `theano_was_first`
    is True.

    Raises
    ------
    MgpuError
        If a flag cannot be read, or Theano can write no compiled code.
    """
    global theano_was_first
    theano_was_first = 'theano' in sys.modules
    if theano_was_first:
        return
    users = os.environ.get('THEANO_FLAGS')
    flags = config.parse_flags(users or '')
    apply(table.AS_FLAGS, flags)
    config.set_environment_flags(flags)
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
    if theano_imports.own_command() is not None:  # the user has no objects yet
        gc.freeze()  # Theano's live as long as the process: Python need not look for garbage among them
