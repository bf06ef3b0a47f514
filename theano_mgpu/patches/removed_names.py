"""Names that NumPy and Python have removed, and that Theano 1.0.5 and Keras 2.3.1 still use."""
import collections
import collections.abc
import warnings

NUMPY_ALIASES = {'bool': bool, 'int': int, 'float': float, 'complex': complex,
                 'object': object, 'str': str}
COLLECTIONS_ABCS = ('Callable', 'Container', 'Hashable', 'Iterable', 'Iterator', 'Mapping',
                    'MutableMapping', 'MutableSequence', 'MutableSet', 'Sequence', 'Set', 'Sized')


def restore_numpy_aliases():
    """NumPy 1.24 removed ``np.bool`` and similar names; Theano 1.0.5 raises an AttributeError without them."""
    import numpy
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy 1.20 to 1.23 warn when the names are looked up
        missing = {name: value for name, value in NUMPY_ALIASES.items() if not hasattr(numpy, name)}
    vars(numpy).update(missing)


def restore_collections_abcs():
    """Python 3.10 removed ``collections.Iterable`` and similar names; Keras 2.3.1 still imports them."""
    for name in COLLECTIONS_ABCS:
        if not hasattr(collections, name):
            setattr(collections, name, getattr(collections.abc, name))
