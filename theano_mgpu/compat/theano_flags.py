"""Theano's flags: its own as it can be imported with them, and theano_mgpu's.

The functions that take `flags` change what Theano reads as THEANO_FLAGS while it is imported, a dict of str to str.
"""
from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import warnings

from .. import config
from ..errors import MgpuError


def hide_own_flags(flags: dict[str, str]) -> None:
    """Hide theano_mgpu's own flags, which Theano does not know before `register_own_flags`.

    Without this, Theano warns that it does not recognise them.
    """
    for name in [name for name in flags if name.startswith('mgpu.')]:
        del flags[name]


def hide_contexts(flags: dict[str, str]) -> None:
    """Keep Theano from opening the devices of the flag ``contexts``: `theano_mgpu.devices` does so on demand.

    Theano opens them when it is imported, only logs an error where a device cannot be opened, and loses the second name
    of a device.
    """
    flags['contexts'] = ''


def show_contexts() -> None:
    """Give ``theano.config.contexts`` the user's map, which `hide_contexts` hid: scripts read its names there."""
    import theano.gpuarray  # noqa: F401  which would open these contexts, if it was imported later
    from theano import configparser
    flag, = [flag for flag in configparser._config_var_list if flag.fullname == 'contexts']
    flag.val = config.flag('contexts', '')


def refuse_old_devices(flags: dict[str, str]) -> None:
    """Refuse ``device=gpu0``, a name of Theano's old back-end, and tell its new name and a map of several devices.

    Raises
    ------
    MgpuError
        For a value of ``device`` or ``init_gpu_device`` that begins with gpu.
    """
    for name in ('device', 'init_gpu_device'):
        value = str(config.flag(name, ''))
        if value.startswith('gpu'):
            new = value.replace('gpu', 'cuda', 1)
            raise MgpuError('flag %s=%s: Theano 1.0 calls this device %s. For several devices map contexts, and leave '
                            'out %s: THEANO_FLAGS=contexts=dev0->cuda0;dev1->cuda1' % (name, value, new, name))


def default_blas_flags(flags: dict[str, str]) -> None:
    """Choose a BLAS unless the user did.

    Without a value, Theano 1.0.5 asks ``np.distutils.__config__.blas_opt_info``, which NumPy 1.22
    and later lack, and dies at import.
    """
    if config.flag('blas.ldflags') is None:
        flags['blas.ldflags'] = blas_ldflags()


def blas_ldflags() -> str:
    """Return linker flags of a BLAS that links: ``-lopenblas`` where OpenBLAS's link is installed, else none."""
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    folders = ['/usr/lib/' + multiarch, '/usr/local/lib', '/usr/lib64', '/usr/lib', '/lib64', '/lib',
               os.path.join(sys.prefix, 'lib')] + os.environ.get('LIBRARY_PATH', '').split(os.pathsep)
    installed = any(os.path.exists(os.path.join(folder, 'libopenblas.so')) for folder in folders if folder)
    return '-lopenblas' if installed else ''


def do_without_python_headers(flags: dict[str, str]) -> None:
    """Turn off Theano's compiler, so that it interprets graphs, where Python.h is not installed; a warning says so.

    Without this, Theano finds g++, and its import ends in a compiler's error: "Python.h: No such file".
    """
    if config.flag('cxx') is None and shutil.which('g++') and lacks_python_headers():
        flags['cxx'] = ''
        warnings.warn('Python.h is missing, so that Theano cannot compile: it interprets its graphs, slowly, and '
                      'has no convolutions. Debian: apt-get install python3-dev', RuntimeWarning, stacklevel=5)


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
    config.check_own_names()
    for name in config.OWN_FLAGS:  # before the first one is added: a second import raises this error again, or none
        config.own_flag(name)
    configparser.THEANO_FLAGS_DICT.update({name: value for name, value in config.environment_flags().items()
                                           if name in config.OWN_FLAGS})
    for name, (default, allowed, doc) in config.OWN_FLAGS.items():
        if isinstance(allowed, tuple) and not isinstance(allowed, (config.Number, config.Ratio)):
            kind = EnumStr(default, *[value for value in allowed if value != default])
            kind.filter = _with_booleans(kind.filter)
        else:
            kind = (IntParam if isinstance(default, int) else StrParam)(default)
        AddConfigVar(name, doc, kind, in_c_key=False)


def _with_booleans(allowed):
    """Return a filter of values that takes True and False, too, as Theano's own flags do."""
    return lambda value: allowed(str(value) if isinstance(value, bool) else value)
