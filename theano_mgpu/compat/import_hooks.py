"""Functions that run before, while or after a module is imported."""
from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping

_after: Dict[str, List[Callable[[Any], Any]]] = {}  # name of a module -> functions that are called with it
_during: Dict[str, List[Callable[[], ContextManager[None]]]] = {}
_before: Dict[str, List[Callable[[], Any]]] = {}
_refused: Dict[str, str] = {}                       # name of a module -> the message of its ImportError


def after_import(name: str, function: Callable[[Any], Any]) -> None:
    """Call ``function(module)`` each time that a module is executed; at once if it is imported already."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        _after.setdefault(name, []).append(function)


def before_import(name: str, function: Callable[[], Any]) -> None:
    """Call ``function()`` once, before a module is imported; at once if its import has begun."""
    if name in sys.modules:
        function()
    else:
        _before.setdefault(name, []).append(function)


def during_import(name: str, function: Callable[[], ContextManager[None]]) -> None:
    """Wrap each execution of a module in the context manager that ``function()`` returns."""
    _during.setdefault(name, []).append(function)


@contextlib.contextmanager
def replaced(modules: Mapping[str, Any], replaces: bool = True) -> Iterator[None]:
    """Replace modules in the ``with`` block, unless one of them is imported already.

    Parameters
    ----------
    modules : dict of str to module
        By their full names. None has each import of the module raise an ImportError.
    replaces : bool
        False has the block do nothing.
    """
    replaces = replaces and sys.modules.keys().isdisjoint(modules)
    if replaces:
        sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules if replaces else ():
            del sys.modules[name]


def refuse_import(name: str, message: str) -> None:
    """Raise an ImportError with this message when a module is imported."""
    _refused[name] = message


class _Finder(importlib.abc.MetaPathFinder):
    """The finder that looks for modules before Python's own finders, and calls the functions for them."""

    def find_spec(self, name, path, target=None):
        if name in _refused:
            raise ImportError(_refused[name], name=name)
        for function in _before.pop(name, ()):
            function()
        if name not in _after and name not in _during:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                with contextlib.ExitStack() as entered:
                    for function in _during.get(name, ()):
                        entered.enter_context(function())
                    execute(module)
                for function in _after.get(name, ()):
                    function(module)
            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
