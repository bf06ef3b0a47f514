"""The imports of Theano 1.0.5, and a module that scripts import from it."""
from __future__ import annotations

import os
import sys
import warnings
from typing import Any, ContextManager

from .import_hooks import new_module, replaced
from .wrapping import wrap

IMPORTED = 'MGPU_IMPORTED'  # in the environment of processes that this one starts, see theano_mgpu_first.py
BY_PARENT = 'parent'         # its value there; a user gives it the value 1


def have_child_processes_patched() -> None:
    """Make processes that this one starts import theano_mgpu before Theano and Keras: see theano_mgpu_first.py."""
    os.environ[IMPORTED] = BY_PARENT


def parts_of_scipy_left_out() -> ContextManager[None]:
    """Leave out ``scipy.stats`` and ``scipy.signal`` while Theano is imported.

    One op needs the former, and imports it by name then. Theano imports all of the latter to find
    ``scipy.signal.sigtools``, which SciPy 1.8 and later do not have.
    """
    import scipy
    # From SciPy 1.9 on, the attributes import parts of SciPy by name.
    return replaced({'scipy.stats': new_module('scipy.stats'), 'scipy.signal': None},
                    hasattr(scipy, '__getattr__'))


def convolve_by_scipy(module: Any) -> None:
    """Import what convolutions in Python need when the first one is computed: SciPy 1.8 moved it to other modules.

    `module` is ``theano.tensor.nnet.conv`` or ``theano.tensor.nnet.abstract_conv``.
    """
    @wrap(*((module.ConvOp, 'perform') if hasattr(module, 'ConvOp') else (module.BaseAbstractConv, 'conv')))
    def convolve(original, *args, **kwargs):
        if not module.imported_scipy_signal:
            from scipy.signal import _signaltools, _sigtools
            names = '_valfrommode', '_bvalfromboundary', 'convolve'
            vars(module).update(imported_scipy_signal=True, _convolve2d=_sigtools._convolve2d,
                                **{name: getattr(_signaltools, name) for name in names})
        return original(*args, **kwargs)


def ignore_syntax_warnings() -> None:
    """Register a filter for the SyntaxWarnings of Theano's and Keras's files."""
    # Python 3.13.4 to 3.13.9 do not say which file is imported: then no file is warned of at its first import.
    theirs = r'.*[/\\](theano|keras)[/\\]|importlib\._bootstrap$'
    warnings.filterwarnings('ignore', category=SyntaxWarning, module=theirs)


def restore_downsample() -> None:
    """Restore ``theano.tensor.signal.downsample``, which Theano 0.9 renamed, for Lasagne 0.1 and scripts of its time.
    """
    from theano.tensor import signal
    from theano.tensor.signal import pool

    def max_pool_2d(input, ds, ignore_border=None, st=None, padding=(0, 0), mode='max'):
        return pool.pool_2d(input, ds, ignore_border, st, padding, mode)

    signal.downsample = sys.modules[signal.__name__ + '.downsample'] = new_module(
        signal.__name__ + '.downsample', max_pool_2d=max_pool_2d, max_pool_2d_same_size=pool.max_pool_2d_same_size)
