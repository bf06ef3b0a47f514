"""The BLAS libraries of this process: their versions, kernels and threads, by which products round."""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
from typing import Any, Iterator

KNOWN = re.compile(r'lib\w*(openblas|mkl_rt|blis|atlas)[^/]*\.so[^/]*$')
OPENBLAS = 'openblas_%s', 'openblas_%s64_', 'scipy_openblas_%s64_'  # as built by distributions, and in NumPy's wheels
SETTERS = (*[name % 'set_num_threads' for name in OPENBLAS], 'MKL_Set_Num_Threads', 'bli_thread_set_num_threads')


def loaded() -> dict[str, str]:
    """Return the version and kernel of each BLAS that is loaded, and its number of threads. Linux only.

    Both are known for OpenBLAS, under its file and under ``threads of FILE``; of another BLAS its path is.
    """
    found = {}
    for path, library in _libraries():
        name = os.path.basename(path)
        config, threads = (_function(library, [each % what for each in OPENBLAS])
                           for what in ('get_config', 'get_num_threads'))
        found[name] = path
        if config and threads:
            config.restype = ctypes.c_char_p
            found[name] = re.sub(r' MAX_THREADS=\d+', '', config().decode())
            found['threads of ' + name] = str(threads())
    return found


def use_threads(number: int) -> None:
    """Have each BLAS that this process has loaded compute in a number of threads."""
    for _, library in _libraries():
        function = _function(library, SETTERS)
        if function:
            function(number)


def _libraries() -> Iterator[tuple[str, ctypes.CDLL]]:
    paths: set[str] = set()
    with contextlib.suppress(OSError), open('/proc/self/maps') as file:
        paths = {line.split(None, 5)[-1].strip() for line in file if KNOWN.search(line.strip())}
    for path in sorted(paths):
        yield path, ctypes.CDLL(path)


def _function(library: ctypes.CDLL, names: Any) -> Any:
    """Return the first function of these names that a library has, or None."""
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)
