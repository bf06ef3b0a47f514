"""Names that NumPy and Python have removed, and that Theano 1.0.5 and Keras 2.3.1 still use."""
from __future__ import annotations

import builtins
import collections
import collections.abc
import warnings

NUMPY_ALIASES = 'bool', 'int', 'float', 'complex', 'object', 'str'


def restore_numpy_aliases() -> None:
    """Restore ``np.bool`` and similar names, which NumPy 1.24 removed; Theano 1.0.5 raises an AttributeError."""
    import numpy
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy 1.20 to 1.23 warn when the names are looked up
        missing = {name: getattr(builtins, name) for name in NUMPY_ALIASES if not hasattr(numpy, name)}
    vars(numpy).update(missing)


def restore_collections_abcs() -> None:
    """Restore ``collections.Iterable`` and similar names, which Python 3.10 removed; Keras 2.3.1 imports them."""
    for name in collections.abc.__all__:
        if not hasattr(collections, name):
            setattr(collections, name, getattr(collections.abc, name))
