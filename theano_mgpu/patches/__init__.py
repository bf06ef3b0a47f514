"""Patches of libraries that get no more releases; see `table` for what each is for.

They are applied from here, once: `before_theano`, `import_theano` and `after_theano`, in this order, when theano_mgpu
is imported; the others with `apply` when a context is opened, or at the first `enable` or
`multi_gpu_model`.
"""
import contextlib
import gc
import os
import sys

from .. import config
from ..errors import MgpuError
from ..utils.collector import collector_paused
from . import import_hooks, theano_imports
from .table import (
    AFTER_THEANO,
    AS_FLAGS,
    BEFORE_THEANO,
    DURING_IMPORT,
    EACH_GPU,
    FIRST_OPENCL,
    FIRST_PLACEMENT,
    PATCHES,
    WITH_CONTEXTS,
    AfterImport,
    BeforeImport,
)

__all__ = ['EACH_GPU', 'FIRST_OPENCL', 'FIRST_PLACEMENT', 'PATCHES', 'WITH_CONTEXTS', 'after_theano', 'apply',
           'before_theano', 'import_theano', 'theano_was_first']

theano_was_first = False  # whether Theano was imported before theano_mgpu
_applied = []             # patches that are applied once a process


def apply(when, *arguments):
    """Apply the patches that the table has for a time, with the arguments that it names."""
    for patch in PATCHES:
        if patch.when == when:
            patch.apply(*arguments)


def before_theano():
    """Apply the patches that have to come before Theano and Keras are imported."""
    _apply_once(BEFORE_THEANO, AfterImport, import_hooks.after_import)


def import_theano():
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
    given = os.environ.get('THEANO_FLAGS')
    flags = config.parse_flags(given or '')
    apply(AS_FLAGS, flags)
    os.environ['THEANO_FLAGS'] = config.join_flags(flags)
    try:
        with collector_paused(), contextlib.ExitStack() as hidden:
            for patch in PATCHES:
                if patch.when == DURING_IMPORT:
                    hidden.enter_context(patch.apply())
            _import_theano()
        if theano_imports.own_command() is not None:  # the user has no objects yet
            gc.freeze()  # Theano's live as long as the process: Python need not look for garbage among them
    finally:
        if given is None:
            del os.environ['THEANO_FLAGS']
        else:
            os.environ['THEANO_FLAGS'] = given


def _import_theano():
    try:
        import theano  # noqa: F401
    except ValueError as error:  # of a home directory that cannot be written, for example
        if 'compiledir directory' not in str(error):
            raise
        raise MgpuError('Theano has no folder for compiled code: %s Name another one: '
                        'THEANO_FLAGS=base_compiledir=/path/to/folder' % error) from error


def after_theano():
    """Patch the imported Theano.

    Raises
    ------
    MgpuError
        If one of theano_mgpu's own flags has a value that it cannot have.
    """
    _apply_once(AFTER_THEANO, BeforeImport, import_hooks.before_import)


def _apply_once(when, kind, hook):
    """Apply the patches for a time, and have a hook apply those for imports of a kind; each once a process."""
    for patch in PATCHES:
        if patch in _applied:
            continue
        if patch.when == when:
            patch.apply()
        elif isinstance(patch.when, kind):
            for module in patch.when.modules:
                hook(module, patch.apply)
        else:
            continue
        _applied.append(patch)
