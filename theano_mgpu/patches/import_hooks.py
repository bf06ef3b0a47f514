"""Functions that run before or after a module is imported."""
import importlib.abc
import importlib.machinery
import sys


def after_import(name, mend):
    """Call ``mend(module)`` once a module is imported: at once if it is already, else when somebody does."""
    if name in sys.modules:
        mend(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, mend))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and mends it each time that it was executed."""

    def __init__(self, name, mend):
        self.name, self.mend = name, mend

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.mend(module)
            spec.loader.exec_module = exec_module
        return spec


def before_import(name, fix):
    """Call ``fix()`` before a module is imported; at once if its import has begun."""
    if name in sys.modules:
        fix()
    else:
        sys.meta_path.insert(0, _BeforeImport(name, fix))


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Finds no module, but calls a function once when one is looked for."""

    def __init__(self, name, fix):
        self.name, self.fix = name, fix

    def find_spec(self, name, path, target=None):
        if name == self.name and self in sys.meta_path:
            sys.meta_path.remove(self)
            self.fix()


class _Gone(importlib.abc.MetaPathFinder):
    """Raises an ImportError with a text of ours where a module is looked for."""

    def __init__(self, name, text):
        self.name, self.text = name, text

    def find_spec(self, name, path, target=None):
        if name == self.name:
            raise ImportError(self.text, name=name)
