"""A second import of the package, after it was removed from sys.modules: its modules are used again.

What it has changed of Theano and Keras refers to them, and cannot be changed twice.
"""
import sys
import types

from .errors import MgpuError

KEPT = '_theano_mgpu_modules'  # in sys.modules: what removes the modules of this package leaves that one
NAME = __name__.partition('.')[0]


def keep():
    """Keep the modules of the package, and Theano, for `restore`."""
    kept = types.ModuleType(KEPT, __doc__)
    kept.modules = {name: module for name, module in sys.modules.items() if name.partition('.')[0] == NAME}
    kept.theano = sys.modules.get('theano')
    sys.modules[KEPT] = kept


def restore():
    """Put the modules of the first import back into sys.modules, if they were removed.

    Raises
    ------
    MgpuError
        If Theano was removed, too.
    """
    kept = sys.modules.get(KEPT)
    if kept is None or kept.modules[NAME] is sys.modules[NAME]:
        return
    if kept.theano is not sys.modules.get('theano'):
        raise MgpuError('theano_mgpu and Theano were removed from sys.modules, and cannot be imported twice in a '
                        'process: start a new one, such as by restarting the kernel of a notebook')
    found = dict(kept.modules)
    waiting = list(found.values())
    while waiting:  # what was imported later is an attribute of a package
        for value in vars(waiting.pop()).values():
            if isinstance(value, types.ModuleType) and value.__name__.partition('.')[0] == NAME \
                    and value.__name__ not in found:
                found[value.__name__] = value
                waiting.append(value)
    del found[NAME]
    sys.modules.update(found)


restore()
