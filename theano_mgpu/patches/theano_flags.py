"""Theano's flags: values with which it can be imported, and theano_mgpu's own."""
import os
import sys
import sysconfig

from .. import config


def blas_ldflags():
    """Linker flags of a BLAS that links: ``-lopenblas`` where OpenBLAS's link is there, else none.

    Without a value, Theano 1.0.5 asks ``np.distutils.__config__.blas_opt_info``, which NumPy 1.22
    and later lack, and dies at import.
    """
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    folders = ['/usr/lib/' + multiarch, '/usr/local/lib', '/usr/lib64', '/usr/lib', '/lib64', '/lib',
               os.path.join(sys.prefix, 'lib')] + os.environ.get('LIBRARY_PATH', '').split(os.pathsep)
    found = any(os.path.exists(os.path.join(folder, 'libopenblas.so')) for folder in folders if folder)
    return '-lopenblas' if found else ''


def lacks_python_headers():
    """Whether C++ code for this Python cannot be compiled, since Python.h is not installed.

    Without this, Theano finds g++ and its import ends in a compiler's error: "Python.h: No such file".
    """
    return not os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))


def _register_own_flags():
    from theano.configparser import AddConfigVar, EnumStr, IntParam, StrParam
    for name, (default, allowed, doc) in config.OWN_FLAGS.items():
        config.own_flag(name)  # raises our own message for a value that it cannot have
        if isinstance(allowed, tuple):
            kind = EnumStr(default, *[value for value in allowed if value != default])
        else:
            kind = (IntParam if isinstance(default, int) else StrParam)(default)
        AddConfigVar(name, doc, kind, in_c_key=False)
