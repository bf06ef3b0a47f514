"""The BLAS libraries of this process: their versions, kernels and threads, by which products round."""
from __future__ import annotations

import contextlib
import ctypes
import os
import re

KNOWN = re.compile(r'lib\w*(openblas|mkl_rt|blis|atlas)[^/]*\.so[^/]*$')
SUFFIXES = '', '64_'  # of OpenBLAS's functions; the library of a NumPy wheel has the second one


def loaded() -> dict[str, str]:
    """Return the version and kernel of each BLAS that is loaded, and its number of threads. Linux only.

    Both are known for OpenBLAS, under its file and under ``threads of FILE``; of another BLAS its path is.
    """
    paths: set[str] = set()
    with contextlib.suppress(OSError), open('/proc/self/maps') as file:
        paths = {line.split(None, 5)[-1].strip() for line in file if KNOWN.search(line.strip())}
    found = {}
    for path in sorted(paths):
        name, library = os.path.basename(path), ctypes.CDLL(path)
        config, threads = (_getter(library, what) for what in ('config', 'num_threads'))
        found[name] = path
        if config and threads:
            config.restype = ctypes.c_char_p
            found[name] = re.sub(r' MAX_THREADS=\d+', '', config().decode())
            found['threads of ' + name] = str(threads())
    return found


def _getter(library, what):
    """Return OpenBLAS's function that gets a value; None in another BLAS."""
    names = ['openblas_get_' + what + suffix for suffix in SUFFIXES]
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)
