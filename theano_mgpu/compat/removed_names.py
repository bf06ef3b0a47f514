"""Names that libraries have removed: restored for Theano and Keras, or told to scripts with what replaced them."""
from __future__ import annotations

import builtins
import collections
import collections.abc
import functools
import importlib
import inspect
import math
import pickle
import shutil
import sys
import time
import warnings
from typing import Any

from ..utils import progress
from . import old_gpu
from .import_hooks import move, new_module, refusal, refuse_import

NUMPY_ALIASES = 'bool', 'int', 'float', 'complex', 'object', 'str'
MAP = "THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', or theano_mgpu.init('dev0->cuda0;dev1->cuda1')"
SHARED = "theano.shared(value, target='dev0')"
BLOCK = "the block `with theano_mgpu.device('dev1'):`"
# Modules of Theano before 1.0, and of scikit-learn before 0.20 and 0.23 -> the modules that have their names today.
MOVED = {'theano.compat.six': 'six', 'theano.compat.python2x': 'collections',
         'theano.sandbox.gpuarray': 'theano.gpuarray', 'sklearn.externals.joblib': 'joblib',
         'sklearn.cross_validation': __package__ + '.cross_validation'}
# Names that old scripts and tutorials use -> their replacements.
REPLACED = {'theano.gpuarray.shared_constructor': SHARED, 'theano.gpuarray.float32_shared_constructor': SHARED,
            'theano.gpuarray.change_flags': BLOCK, 'theano.gpuarray.set_device': BLOCK,
            'theano.gpuarray.gpu_from_host': "x.transfer('dev0')", 'theano.ProfileMode': 'the flag profile=True'}
CUDA = 'theano.sandbox.cuda'
CUDA_MODULES = 'basic_ops', 'blas', 'dnn', 'rng_curand', 'type', 'var'
OLD_PACKAGES = CUDA, 'theano.misc.pycuda_init', 'theano.misc.pycuda_utils'


def restore_numpy_aliases() -> None:
    """Restore ``np.bool`` and other names that NumPy has lost by 1.24; Theano 1.0.5 raises an AttributeError.

    Programs of Theano's time have the others, such as ``np.asscalar``, which PyMC3 3.8 and earlier import.
    """
    import numpy
    names = {**{name: getattr(builtins, name) for name in NUMPY_ALIASES}, 'long': int, 'unicode': str,
             'unicode0': numpy.str_, 'string0': numpy.bytes_, 'typeDict': numpy.sctypeDict, 'rank': numpy.ndim,
             'alen': lambda array: len(numpy.atleast_1d(array)), 'asscalar': lambda array: array.item(),
             'loads': pickle.loads, 'math': math, 'sys': sys, 'warnings': warnings}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy 1.20 to 1.23 warn when the names are looked up
        vars(numpy).update({name: value for name, value in names.items() if not hasattr(numpy, name)})


def restore_collections_abcs() -> None:
    """Restore ``collections.Iterable`` and similar names, which Python 3.10 removed; Keras 2.3.1 imports them."""
    for name in collections.abc.__all__:
        vars(collections).setdefault(name, getattr(collections.abc, name))


def restore_getargspec() -> None:
    """Restore ``inspect.getargspec``, which Python 3.11 removed; Keras 1 and earlier, Lasagne and others call it."""
    ArgSpec = collections.namedtuple('ArgSpec', 'args varargs keywords defaults')
    vars(inspect).setdefault('getargspec', lambda func: ArgSpec(*inspect.getfullargspec(func)[:4]))


def restore_moved_modules() -> None:
    """Restore modules of Theano and of scikit-learn that moved."""
    move(MOVED)


def restore_functions_of_scipy(misc: Any) -> None:
    """Restore functions of ``scipy.misc`` that moved in SciPy 1.0; PyMC3 3.3 and earlier import them."""
    from scipy import special
    vars(misc).update(logsumexp=special.logsumexp, comb=special.comb, factorial=special.factorial)


def restore_clock() -> None:
    """Restore ``time.clock``, which Python 3.8 removed; scripts of Theano's time measure their epochs by it."""
    vars(time).setdefault('clock', time.process_time)


def load_yaml_without_a_loader(yaml: Any) -> None:
    """Have ``yaml.load(text)`` use the loader that it used before PyYAML 6, which wants it named."""
    if not yaml.load.__defaults__:
        yaml.load.__defaults__ = (yaml.FullLoader,)


def restore_find_graphviz(pydot: Any) -> None:
    """Restore ``pydot.find_graphviz``; Keras 0.3 to 1.2 ask it for the programs of Graphviz, or None, when imported."""
    def find_graphviz():
        found = {name: shutil.which(name) for name in ('dot', 'twopi', 'neato', 'circo', 'fdp')}
        return {name: path for name, path in found.items() if path} or None
    vars(pydot).setdefault('find_graphviz', find_graphviz)


def restore_modules() -> None:
    """Restore ``theano.sandbox.cuda``, which Theano had before 1.0, by ops for any device.

    A note says so when its first name is read. Names that are not restored, and old ones of
    ``theano.gpuarray``, are told to scripts with what replaced them. Theano 1.0.5 answers an import of
    ``theano.sandbox.cuda`` with "No module named 'nose'", or as a skipped test.
    """
    import theano.compat
    import theano.gpuarray
    import theano.sandbox
    for name, new in {**dict.fromkeys(OLD_PACKAGES, 'theano.gpuarray'), **REPLACED}.items():
        refuse_import(name, '%s is not part of Theano 1.0: %s replaced it. Contexts are mapped to devices by %s'
                      % (name, new, MAP))
    theano.compat.six = importlib.import_module('six')
    known = old_gpu.names()
    package: Any = new_module(CUDA, __all__=[*known], __path__=[])
    theano.sandbox.cuda = package
    modules = dict.fromkeys(CUDA_MODULES, package)
    known.update(modules)
    sys.modules.update({CUDA: package, **{'%s.%s' % (CUDA, name): package for name in modules}})
    for module, names in (package, known), (theano, {}), (theano.gpuarray, {}), (theano.sandbox, {}):
        vars(module)['__getattr__'] = functools.partial(_answer, module.__name__, names)


def _answer(module, known, name):
    if name not in known:
        raise AttributeError(refusal('%s.%s' % (module, name)) or "module '%s' has no attribute '%s'" % (module, name))
    progress.note('%s is GPU code of Theano before 1.0: ops for any device, which move to those of contexts, replace it'
                  % module)
    return known[name]
