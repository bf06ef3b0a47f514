"""C++ of this package, built at first use by Theano's compiler and kept in Theano's folder of compiled code."""
from __future__ import annotations

import ctypes
import os
import tempfile
import zlib
from pathlib import Path
from typing import Sequence

import theano
from theano.gof.cmodule import GCC_compiler

from ..errors import warn


def load(source: Path, flags: Sequence[str], what: str, instead: str,
         libraries: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Build a shared library of a file, see `build`, and load it; return None without a C++ compiler, or if it fails.

    A warning then says what the code does, by a verb and its object, and by a sentence which code does it instead.
    """
    if not theano.config.cxx:
        return None
    try:
        return ctypes.CDLL(build(source, flags, libraries))
    except Exception as error:  # Theano raises a bare Exception for the errors of a compiler
        warn('the C++ code that %s cannot be built with %s: %s. %s `theano-mgpu doctor` tries the compiler.'
             % (what, theano.config.cxx, error, instead))
        return None


def build(source: Path, flags: Sequence[str] = (), libraries: Sequence[str] = (),
          headers: Sequence[Path] = ()) -> str:
    """Build a shared library of C++11, unless an earlier process did so from the same text, compiler and flags.

    The flags come before Theano's own, the library is linked with `libraries`, and the texts of `headers` come before
    the source. Return its path. If it cannot be compiled, Theano raises a plain Exception with the compiler's messages.
    """
    arguments = list(flags) + GCC_compiler.compile_args()
    text = ''.join(file.read_text(encoding='utf-8') for file in (*headers, source))
    name = '%s_%08x' % (source.stem, zlib.crc32(repr((theano.config.cxx, arguments, text, *libraries)).encode()))
    path = os.path.join(theano.config.compiledir, name + '.so')
    if not os.path.exists(path):
        # Built elsewhere and moved atomically: no other process finds a partial file, so no lock is needed.
        with tempfile.TemporaryDirectory(dir=theano.config.compiledir) as folder:
            GCC_compiler.compile_str(name, text, folder, preargs=arguments, py_module=False, hide_symbols=False,
                                     libs=list(libraries))
            os.replace(os.path.join(folder, name + '.so'), path)
    return path
