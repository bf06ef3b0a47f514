"""C++ of this package, built at first use by Theano's compiler and kept in Theano's folder of compiled code."""
from __future__ import annotations

import ctypes
import os
import tempfile
import warnings
import zlib
from typing import Sequence

import theano
from theano.gof.cmodule import GCC_compiler

from ..errors import MgpuWarning


def load(name: str, source: str, flags: Sequence[str], what: str, instead: str,
         libraries: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Build a shared library and load it.

    Parameters
    ----------
    name, source, flags
        As for `build`.
    what : str
        A verb and its object that say what the code does, for a warning that it cannot be built.
    instead : str
        A sentence that names the code that does it instead.
    libraries
        As for `build`.

    Returns
    -------
    ctypes.CDLL or None
        None where there is no C++ compiler, or the code cannot be built.
    """
    if not theano.config.cxx:
        return None
    try:
        return ctypes.CDLL(build(name, source, flags, libraries))
    except Exception as error:  # Theano raises a bare Exception for the errors of a compiler
        warnings.warn('the C++ code that %s cannot be built with %s: %s. %s `theano-mgpu doctor` tries the compiler.'
                      % (what, theano.config.cxx, error, instead), MgpuWarning, stacklevel=3)
        return None


def build(name: str, source: str, flags: Sequence[str] = (), libraries: Sequence[str] = ()) -> str:
    """Build a shared library, unless an earlier process did so from the same text, compiler and flags.

    Parameters
    ----------
    name : str
        The beginning of the file name.
    source : str
        C++11.
    flags : list of str
        Options of the compiler, before Theano's own.
    libraries : list of str
        The names of libraries that it is linked with.

    Returns
    -------
    str
        The path of the library, for ctypes.

    Raises
    ------
    Exception
        A plain one from Theano, with the compiler's messages, if the source cannot be compiled.
    """
    arguments = list(flags) + GCC_compiler.compile_args()
    name = '%s_%08x' % (name, zlib.crc32(repr((theano.config.cxx, arguments, source, *libraries)).encode()))
    path = os.path.join(theano.config.compiledir, name + '.so')
    if not os.path.exists(path):
        # Built elsewhere and moved atomically: no other process finds a partial file, so no lock is needed.
        with tempfile.TemporaryDirectory(dir=theano.config.compiledir) as folder:
            GCC_compiler.compile_str(name, source, folder, preargs=arguments, py_module=False, hide_symbols=False,
                                     libs=list(libraries))
            os.replace(os.path.join(folder, name + '.so'), path)
    return path
