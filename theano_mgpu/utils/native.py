"""C++ of this package, built at first use by Theano's compiler and kept in Theano's folder of compiled code."""
import os
import tempfile
import zlib

import theano
from theano.gof.cmodule import GCC_compiler


def build(name, source, flags=()):
    """Build a shared library, unless an earlier process did so from the same text, compiler and flags.

    Parameters
    ----------
    name : str
        Beginning of the file name.
    source : str
        C++11.
    flags : list of str
        Options of the compiler, before Theano's own.

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
    name = '%s_%08x' % (name, zlib.crc32(repr((theano.config.cxx, arguments, source)).encode()))
    path = os.path.join(theano.config.compiledir, name + '.so')
    if not os.path.exists(path):
        # Built elsewhere and moved atomically: no other process finds a partial file, so no lock is needed.
        with tempfile.TemporaryDirectory(dir=theano.config.compiledir) as folder:
            GCC_compiler.compile_str(name, source, folder, preargs=arguments, py_module=False, hide_symbols=False)
            os.replace(os.path.join(folder, name + '.so'), path)
    return path
