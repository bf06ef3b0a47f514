"""A second import of the package, after it was removed from sys.modules: its modules are used again.

Its changes of Theano and Keras refer to them, and cannot be made twice.
"""
from __future__ import annotations

import sys
import types

from ..errors import MgpuError

KEPT = '_theano_mgpu_modules'  # in sys.modules: code that removes the modules of this package leaves that one
NAME = __name__.partition('.')[0]


def keep() -> None:
    """Keep the modules of the package, and Theano, for `restore`."""
    store = sys.modules[KEPT] = types.ModuleType(KEPT, __doc__)
    modules = {name: module for name, module in sys.modules.items() if name.partition('.')[0] == NAME}
    vars(store).update(modules=modules, theano=sys.modules.get('theano'))


def restore() -> None:
    """Put the modules of the first import back into sys.modules, if they were removed.

    Raises
    ------
    MgpuError
        If Theano was removed, too.
    """
    store = sys.modules.get(KEPT)
    if store is None or store.modules[NAME] is sys.modules[NAME]:
        return
    if store.theano is not sys.modules.get('theano'):
        raise MgpuError('theano_mgpu and Theano were removed from sys.modules, and cannot be imported twice in a '
                        'process: start a new one, such as by restarting the kernel of a notebook')
    modules = dict(store.modules)
    waiting = list(modules.values())
    while waiting:  # a module that was imported later is an attribute of a package
        for value in vars(waiting.pop()).values():
            if isinstance(value, types.ModuleType) and value.__name__.partition('.')[0] == NAME \
                    and value.__name__ not in modules:
                modules[value.__name__] = value
                waiting.append(value)
    del modules[NAME]
    sys.modules.update(modules)


restore()
