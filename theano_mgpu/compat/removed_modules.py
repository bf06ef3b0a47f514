"""Modules that Python, NumPy and setuptools have removed, and that Theano 1.0.5 still imports.

Each is replaced by a module that has only the names that Theano uses. Theano alone sees the replacement: it is in
``sys.modules`` while the module of Theano that imports it is executed.
"""
from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from typing import ContextManager

from .import_hooks import new_module, replaced


def replace_pkg_resources() -> ContextManager[None]:
    """Replace ``pkg_resources``, which setuptools 82 removed, by one exception: Theano uses no more of it.

    The real module is left to scikit-cuda, which needs it.
    """
    name = 'pkg_resources'
    replaces = importlib.util.find_spec('skcuda') is None or importlib.util.find_spec(name) is None
    return replaced({name: new_module(name, DistributionNotFound=type('DistributionNotFound', (Exception,), {}),
                                   __getattr__=_refuse_other_names)}, replaces)


def _refuse_other_names(name):
    """Raise the error that scikit-cuda, which looks for other names, would meet without a replacement."""
    raise ImportError("No module named 'pkg_resources'", name='pkg_resources')


def replace_imp() -> ContextManager[None]:
    """Replace ``imp``, which Python 3.12 removed, by an empty module: Theano needs it for a debugger of its own."""
    return replaced({'imp': new_module('imp')}, sys.version_info >= (3, 12))


def replace_distutils() -> ContextManager[None]:
    """Replace ``distutils``, which Python 3.12 removed, by functions of ``sysconfig`` and ``shutil``."""
    config = new_module(
        'distutils.sysconfig', get_config_var=sysconfig.get_config_var,
        get_config_h_filename=sysconfig.get_config_h_filename, get_python_version=sysconfig.get_python_version,
        get_python_inc=lambda plat_specific=False: sysconfig.get_path('platinclude' if plat_specific else 'include'),
        get_python_lib=lambda plat_specific, standard_lib: sysconfig.get_path('stdlib'))  # Theano asks for no other one
    spawn = new_module('distutils.spawn', find_executable=shutil.which)
    package = new_module('distutils', sysconfig=config, spawn=spawn, __path__=[])
    return replaced({module.__name__: module for module in (package, config, spawn)}, sys.version_info >= (3, 12))


def restore_numpy_distutils() -> None:
    """Restore ``numpy.distutils``, which NumPy does not have on Python 3.12, for the folder of NumPy's headers.

    Theano asks ``numpy`` for it at each compilation, so that it stays there.
    """
    import numpy
    if sys.version_info < (3, 12) or hasattr(numpy, 'distutils'):
        return
    utilities = new_module('numpy.distutils.misc_util', get_numpy_include_dirs=lambda: [numpy.get_include()])
    package = new_module('numpy.distutils', misc_util=utilities, __path__=[])
    sys.modules.update({module.__name__: module for module in (package, utilities)})
    vars(numpy)['distutils'] = package
