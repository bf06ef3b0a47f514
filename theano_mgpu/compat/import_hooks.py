"""Functions that run before, while or after a module is imported."""
from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Mapping

# Functions by the name of a module, for each side of its import.
_hooks: Dict[str, Dict[str, List[Callable[..., Any]]]] = {'before': {}, 'during': {}, 'after': {}}
_refused: Dict[str, str] = {}  # name of a module -> the message of its ImportError
_moved: Dict[str, str] = {}  # name that a module had -> its name of today
_again: Dict[str, importlib.machinery.ModuleSpec] = {}  # name of a package that is executed already -> how to import it


def at_import(side: str, name: str, function: Callable[..., Any]) -> None:
    """Call a function when a module is imported.

    Parameters
    ----------
    side : str
        before: ``function()`` is called once, before the import; at once if that has begun.
        during: each execution is wrapped in the context manager that ``function()`` returns.
        after: ``function(module)`` is called after each execution; at once if the module is imported already.
    """
    if side == 'during' or name not in sys.modules:
        _hooks[side].setdefault(name, []).append(function)
    elif side == 'before':
        function()
    else:
        function(sys.modules[name])


def at_next_import(package: str, function: Callable[[], Any]) -> None:
    """Call ``function()`` once, when a package that is imported already, or a module of it, is imported next."""
    modules = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] == package}
    module = modules[package]
    own_spec = module.__spec__  # which Python replaces

    def import_again():
        sys.modules.update(modules)
        function()
        del sys.modules[package]  # else Python would execute it once more
        _again[package] = importlib.machinery.ModuleSpec(package, types.SimpleNamespace(
            create_module=lambda spec: module, exec_module=lambda module: vars(module).update(__spec__=own_spec)))
    at_import('before', package, import_again)


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
    added = modules if replaces and sys.modules.keys().isdisjoint(modules) else {}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def new_module(name: str, **names: Any) -> types.ModuleType:
    """Return a new module with these names."""
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


def refuse_import(name: str, message: str) -> None:
    """Raise an ImportError with this message, which begins with the name, when a module or one below it is imported."""
    _refused[name] = message


def move(names: Mapping[str, str]) -> None:
    """Import modules, and those below them, by names that they had, if Python does not find them.

    `names` maps these to the names of today.
    """
    _moved.update(names)


def _has_moved(name, path):
    """Return whether a module has another name today, or is below one that has."""
    package = name.rpartition('.')[0]
    if package in _moved and sys.modules[package].__name__ == _moved[package]:
        _moved[name] = _moved[package] + name[len(package):]
        return True
    return name in _moved and importlib.machinery.PathFinder.find_spec(name, path) is None


class _Mover(importlib.abc.Loader):
    """The loader of modules that have another name today."""

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module(_moved[module.__name__])


def refusal(name: str) -> str:
    """Return the message of the ImportError of a module that is refused, or of a name of it; else the empty string."""
    return next((text.replace(refused, name, 1) for refused, text in _refused.items()
                 if (name + '.').startswith(refused + '.')), '')


class _Finder(importlib.abc.MetaPathFinder):
    """The finder that looks for modules before Python's own finders, and calls the functions for them."""

    def find_spec(self, name, path, target=None):
        message = refusal(name)
        if message:
            raise ImportError(message, name=name)
        for function in _hooks['before'].pop(name, ()):
            function()
        if _has_moved(name, path):
            return importlib.machinery.ModuleSpec(name, _Mover())
        if name in _again:
            return _again.pop(name)
        if name not in _hooks['during'] and name not in _hooks['after']:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                with contextlib.ExitStack() as entered:
                    for function in _hooks['during'].get(name, ()):
                        entered.enter_context(function())
                    execute(module)
                for function in _hooks['after'].get(name, ()):
                    function(module)
            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
