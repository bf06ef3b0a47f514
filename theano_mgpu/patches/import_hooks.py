"""Functions that run before or after a module is imported."""
import importlib.abc
import importlib.machinery
import sys


def after_import(name, function):
    """Call ``function(module)`` each time that a module is executed; at once if it is imported already.

    Parameters
    ----------
    name : str
        The full name of the module.
    function : callable
        Several functions for one module are called in the order in which they were passed.
    """
    if name in sys.modules:
        function(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, _AfterImport) and finder.name == name:
            finder.functions.append(function)
            return
    sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and calls functions each time that it was executed."""

    def __init__(self, name, function):
        self.name, self.functions = name, [function]

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for function in self.functions:
                    function(module)
            spec.loader.exec_module = exec_module
        return spec


def before_import(name, function):
    """Call ``function()`` once, before a module is imported; at once if its import has begun."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _BeforeImport(name, function))


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Finds no module, but calls a function at the first search for one."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def find_spec(self, name, path, target=None):
        if name == self.name and self in sys.meta_path:
            sys.meta_path.remove(self)
            self.function()


def refuse_import(name, message):
    """Raise an ImportError with a message of ours when a module is imported."""
    sys.meta_path.insert(0, _Refused(name, message))


class _Refused(importlib.abc.MetaPathFinder):
    def __init__(self, name, message):
        self.name, self.message = name, message

    def find_spec(self, name, path, target=None):
        if name == self.name:
            raise ImportError(self.message, name=name)
