"""Theano's flags: its own as it can be imported with them, and theano_mgpu's.

The functions that take `theanos` change what Theano reads as THEANO_FLAGS while it is imported, a dict of str to str.
"""
from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import warnings

from ..utils import flag_text, progress
from ..utils.flag_text import GONE, OWN_FLAGS, Number, Ratio
from . import old_flags

OWN_FLAGS.update({
    'mgpu.compile_jobs': (0, Number('modules', 0),
                          'Modules of C code that g++ compiles at a time for a function; 0 is one for each core.'),
    'mgpu.keep_graphs': ('True', ('False', 'True'),
                         'Whether the optimised graphs of functions are kept beside the compiled code, for the next '
                         'process that makes the same functions.'),
    'mgpu.tf32': ('False', ('False', 'True'),
                  'Whether cuDNN 8 and later may compute convolutions of float32, and cuBLAS 11 and later products of '
                  'matrices, as TF32, which keeps 11 bits of precision and is faster, on compute capability 8.0 and '
                  'later.'),
    'mgpu.vector_math': ('auto', ('auto', 'off'),
                         'How exp, log, tanh, sigmoid, pow and the like are computed on the host: several elements at '
                         "a time, within 4 units in the last place, by glibc's libmvec where it is installed (auto); "
                         'or one element at a time, by libm (off).'),
})


def hide_own_flags(theanos: dict[str, str]) -> None:
    """Hide theano_mgpu's own flags, which Theano does not know before `register_own_flags`."""
    for name in [name for name in theanos if name.startswith('mgpu.')]:
        del theanos[name]


def default_blas_flags(theanos: dict[str, str]) -> None:
    """Choose a BLAS unless the user did.

    Without a value, Theano 1.0.5 asks ``np.distutils.__config__.blas_opt_info``, which NumPy 1.22
    and later lack, and dies at import.
    """
    if flag_text.flag('blas.ldflags') is None:
        theanos['blas.ldflags'] = blas_ldflags()


def blas_ldflags() -> str:
    """Return linker flags of a BLAS that links: ``-lopenblas`` where OpenBLAS's link is installed, else none."""
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    folders = ['/usr/lib/' + multiarch, '/usr/local/lib', '/usr/lib64', '/usr/lib', '/lib64', '/lib',
               os.path.join(sys.prefix, 'lib')] + os.environ.get('LIBRARY_PATH', '').split(os.pathsep)
    installed = any(os.path.exists(os.path.join(folder, 'libopenblas.so')) for folder in folders if folder)
    return '-lopenblas' if installed else ''


def do_without_python_headers(theanos: dict[str, str]) -> None:
    """Turn off Theano's compiler, so that it interprets graphs, where Python.h is not installed; a warning says so."""
    if flag_text.flag('cxx') is None and shutil.which('g++') and lacks_python_headers():
        theanos['cxx'] = ''
        warnings.warn('Python.h is missing, so that Theano cannot compile: it interprets its graphs, slowly, and '
                      'has no convolutions. Debian: apt-get install python3-dev', RuntimeWarning, stacklevel=1)


def lacks_python_headers() -> bool:
    """Return whether C++ code for this Python cannot be compiled, since Python.h is not installed."""
    return not os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))


def register_own_flags() -> None:
    """Add theano_mgpu's own flags to ``theano.config``, with the values that `hide_own_flags` hid.

    Raises
    ------
    MgpuError
        If a flag of ours does not exist, or has a value that it cannot have.
    """
    from theano import configparser
    from theano.configparser import AddConfigVar, EnumStr, IntParam, StrParam
    flag_text.check_own_names()
    for name in OWN_FLAGS:  # before the first one is added: a second import raises this error again, or none
        flag_text.own_flag(name)
    configparser.THEANO_FLAGS_DICT.update({name: value for name, value in flag_text.environment_flags().items()
                                           if name in OWN_FLAGS})
    for name, (default, allowed, doc) in OWN_FLAGS.items():
        if isinstance(allowed, tuple) and not isinstance(allowed, (Number, Ratio)):
            kind = EnumStr(default, *[value for value in allowed if value != default])
            kind.filter = _with_booleans(kind.filter)
        else:
            kind = (IntParam if isinstance(default, int) else StrParam)(default)
        if isinstance(allowed, str):  # the path of a file: the script may change the current folder
            kind.filter = lambda value: value and os.path.abspath(value)
        AddConfigVar(name, doc, kind, in_c_key=False)
    for name, (value, reason) in GONE.items():  # a script may still read or set them
        kind = StrParam(value)
        kind.val, kind.filter = value, _kept(name)  # `read_old_flags` has taken the values of the user
        AddConfigVar(name, 'It has gone: ' + reason, kind, in_c_key=False)


def _kept(name):
    """Return a filter of values that keeps the one of a flag which has gone, and says so."""
    def kept(value):
        said = old_flags.today({name: str(value)})[1]
        if said:
            progress.note(said)
        return GONE[name][0]
    return kept


def _with_booleans(allowed):
    """Return a filter of values that takes True and False, too, as Theano's own flags do."""
    return lambda value: allowed(str(value) if isinstance(value, bool) else value)
