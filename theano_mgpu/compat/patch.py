"""A patch of a library, as the row of a table, and the times at which tables are applied.

Each room that patches a library has such a table in a module `patches`.
"""
from __future__ import annotations

import threading
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple, Type, Union

from . import import_hooks, numpy2


class AtImport(NamedTuple):
    """The time of a patch that is applied when modules are imported."""

    side: str
    modules: Tuple[str, ...]

    def __str__(self) -> str:
        return '%s import of %s' % (self.side, ', '.join(self.modules))


def before(*modules: str) -> AtImport:
    """Return the time before one of some modules is imported: ``apply()`` is called once."""
    return AtImport('before', modules)


def during(*modules: str) -> AtImport:
    """Return the time while one of some modules is executed: ``apply()`` is a context manager."""
    return AtImport('during', modules)


def after(*modules: str) -> AtImport:
    """Return the time after one of some modules was executed: ``apply(module)`` is called each time."""
    return AtImport('after', modules)


BEFORE_THEANO = 'before Theano is imported'
AS_FLAGS = 'as flags that Theano is imported with'    # apply(flags), see theano_flags.py
AFTER_THEANO = 'after Theano was imported'
AT_ENABLE = 'at the first enable()'                   # or multi_gpu_model; both call the function themselves

NUMPY_2 = '2'  # the versions of patches that are not applied with NumPy 1


class Patch(NamedTuple):
    """One patch of a library."""

    library: str
    versions: str
    symptom: str                # the behaviour without the patch
    when: Union[str, AtImport]  # a time of this module, or one that the table's module defines
    apply: Callable[..., Any]
    test: str                   # the name of a test that fails without the patch

    def is_needed(self) -> bool:
        """Return whether the installed library may need the patch."""
        return self.versions != NUMPY_2 or numpy2.is_needed()


_applied: List[Patch] = []  # patches that are applied once a process
_applying = threading.RLock()


def apply(table: Sequence[Patch], when: Union[str, Type[AtImport]], *arguments: Any, again: bool = False) -> None:
    """Apply the patches that a table has for a time, or at imports (`AtImport`): once a process, unless `again`."""
    with _applying:
        for patch in table:
            if patch in _applied or not patch.is_needed() or when not in (patch.when, type(patch.when)):
                continue
            if isinstance(patch.when, AtImport):
                for module in patch.when.modules:
                    import_hooks.at_import(patch.when.side, module, patch.apply)
            else:
                patch.apply(*arguments)
            if not again:
                _applied.append(patch)
