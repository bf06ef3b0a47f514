"""Names that NumPy, Python, PyYAML and pydot have removed, and that Theano 1.0.5 and Keras still use."""
from __future__ import annotations

import builtins
import collections
import collections.abc
import inspect
import shutil
import warnings
from typing import Any

NUMPY_ALIASES = 'bool', 'int', 'float', 'complex', 'object', 'str'


def restore_numpy_aliases() -> None:
    """Restore ``np.bool`` and similar names, which NumPy 1.24 removed; Theano 1.0.5 raises an AttributeError.

    ``np.asscalar``, which PyMC3 3.8 and earlier import, is gone since NumPy 1.23.
    """
    import numpy
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy 1.20 to 1.23 warn when the names are looked up
        missing = {name: getattr(builtins, name) for name in NUMPY_ALIASES if not hasattr(numpy, name)}
        missing['asscalar'] = getattr(numpy, 'asscalar', lambda array: array.item())
    vars(numpy).update(missing)


def restore_collections_abcs() -> None:
    """Restore ``collections.Iterable`` and similar names, which Python 3.10 removed; Keras 2.3.1 imports them."""
    for name in collections.abc.__all__:
        if not hasattr(collections, name):
            setattr(collections, name, getattr(collections.abc, name))


def restore_getargspec() -> None:
    """Restore ``inspect.getargspec``, which Python 3.11 removed; Keras 1 and earlier, Lasagne and others call it."""
    if hasattr(inspect, 'getargspec'):
        return
    ArgSpec = collections.namedtuple('ArgSpec', 'args varargs keywords defaults')

    def getargspec(func):
        return ArgSpec(*inspect.getfullargspec(func)[:4])
    inspect.getargspec = getargspec  # type: ignore[attr-defined]


def load_yaml_without_a_loader(yaml: Any) -> None:
    """Have ``yaml.load(text)`` use the loader that it used before PyYAML 6, which wants it named."""
    if not yaml.load.__defaults__:
        yaml.load.__defaults__ = (yaml.FullLoader,)


def restore_find_graphviz(pydot: Any) -> None:
    """Restore ``pydot.find_graphviz``; Keras 0.3 to 1.2 ask it for the programs of Graphviz, or None, when imported."""
    def find_graphviz():
        found = {name: shutil.which(name) for name in ('dot', 'twopi', 'neato', 'circo', 'fdp')}
        return {name: path for name, path in found.items() if path} or None
    if not hasattr(pydot, 'find_graphviz'):
        pydot.find_graphviz = find_graphviz
