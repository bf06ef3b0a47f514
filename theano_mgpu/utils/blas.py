"""The BLAS libraries of this process: their versions, kernels and threads, by which products round."""
from __future__ import annotations

import contextlib
import ctypes
import os
import re

KNOWN = re.compile(r'lib\w*(openblas|mkl_rt|blis|atlas)[^/]*\.so[^/]*$')
SUFFIXES = '', '64_'  # of OpenBLAS's functions; the library of a NumPy wheel has the second one


def loaded() -> list[str]:
    """Return a line for each BLAS that is loaded; of OpenBLAS with its version, kernel and threads. Linux only."""
    paths = set()
    with contextlib.suppress(OSError), open('/proc/self/maps') as file:
        paths = {line.split(None, 5)[-1].strip() for line in file if KNOWN.search(line.strip())}
    return sorted(map(_described, paths))


def _described(path):
    library, words = ctypes.CDLL(path), []
    for name, result in (('config', ctypes.c_char_p), ('num_threads', ctypes.c_int)):
        for suffix in SUFFIXES:
            with contextlib.suppress(AttributeError):
                function = getattr(library, 'openblas_get_%s%s' % (name, suffix))
                function.restype = result
                value = function()
                words.append('%d threads' % value if result is ctypes.c_int else
                             re.sub(r' MAX_THREADS=\d+', '', value.decode()))
    return ', '.join([os.path.basename(path)] + words)
