"""The BLAS of the host: its number of threads, and what else the bits of its results depend on."""
from __future__ import annotations

import ctypes
import os
import re
from typing import Iterator

import theano
from theano.gof.cmodule import GCC_compiler

MAPS = '/proc/self/maps'  # Linux has it
LIBRARY = re.compile(r'(/\S*/lib[^/\s]*(?:blas|mkl_rt|blis)[^/\s]*\.so[^/\s]*)$', re.MULTILINE)
# The functions that set the number of threads: of OpenBLAS in Debian, and in the wheels of NumPy; of MKL, and of BLIS.
SETTERS = ('openblas_set_num_threads', 'openblas_set_num_threads64_', 'scipy_openblas_set_num_threads64_',
           'MKL_Set_Num_Threads', 'bli_thread_set_num_threads')
# The functions that return the text that the processor was recognised by.
KERNELS = 'openblas_get_corename', 'openblas_get_corename64_', 'scipy_openblas_get_corename64_'


def use_threads(number: int) -> None:
    """Have each BLAS that this process has loaded compute in a number of threads."""
    for function in _functions(SETTERS):
        function(number)


def description() -> str:
    """Return a text that is the same on hosts whose compiled code and BLAS round alike."""
    names = []
    for function in _functions(KERNELS):
        function.restype = ctypes.c_char_p
        names.append(function().decode())
    return ' '.join([*names, theano.config.blas.ldflags, theano.config.gcc.cxxflags,
                     *(GCC_compiler.march_flags or [])])


def _functions(names: tuple[str, ...]) -> Iterator[ctypes._FuncPointer]:
    """Yield the functions of these names in the BLAS libraries that are loaded."""
    if not os.path.exists(MAPS):
        return
    with open(MAPS) as file:
        paths = sorted(set(LIBRARY.findall(file.read())))
    for path in paths:
        library = ctypes.CDLL(path)
        yield from (getattr(library, name) for name in names if hasattr(library, name))
