"""The sum of host buffers in compiled code: several threads, each buffer read once, the sum written once.

The code is C++, built at first use by Theano's compiler into Theano's folder of compiled code, and called through
ctypes, which lets go of Python's lock. It keeps nothing from call to call, so several threads may call it at once.
"""
from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Sequence

import numpy as np
import theano

from ..utils import native
from ..utils.pointers import pointers_to

FLAGS = ['-O3', '-pthread']
# From this many elements on the call is cheaper than NumPy's loop over blocks.
SMALLEST = 1 << 14
# Bytes read and written for which one more thread is worth its start. Above two shares, which no cache is
# counted on to hold, the sum is written past the cache, so that its lines are not read first.
SHARE = 1 << 23
SOURCE = Path(__file__).with_name('host_reduce.cpp')


def applies(out: np.ndarray, buffers: Sequence[np.ndarray]) -> bool:
    """Return whether the compiled code can sum these flat buffers, and faster than NumPy.

    It cannot for few elements, for a dtype other than float32 or float64, and without a C++ compiler.
    """
    return (out.size >= SMALLEST and out.dtype in _functions(theano.config.cxx) and out.flags.writeable
            and all(array.dtype == out.dtype and array.flags.aligned for array in [out, *buffers]))


def add(out: np.ndarray, buffers: Sequence[np.ndarray]) -> None:
    """Write the sum of buffers for which `applies` holds. The first one may be `out`.

    Each element is summed in the order of the buffers, whatever the number of threads.
    """
    function = _functions(theano.config.cxx)[out.dtype]
    count = len(buffers)
    shares = (count + 1) * out.nbytes // SHARE
    function(out.ctypes.data, pointers_to(buffers), count, out.size, shares > 1, max(1, min(threads(), shares)))


def threads() -> int:
    """Return how many threads may sum: the cores of this process, or OMP_NUM_THREADS where that is less."""
    cores = len(os.sched_getaffinity(0))
    wished = os.environ.get('OMP_NUM_THREADS', '').split(',')[0].strip()
    return max(1, min(cores, int(wished))) if wished.isdigit() else cores


@functools.lru_cache(maxsize=None)
def _functions(compiler):
    """Return the compiled function of each dtype; none where the code cannot be built."""
    library = native.load(SOURCE, FLAGS, 'adds gradients on the host',
                          'NumPy adds them, on one core.')
    if library is None:
        return {}
    functions = {}
    for name in ('float32', 'float64'):
        function = getattr(library, 'sum_' + name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int,
                             ctypes.c_int]
        function.restype = None
        functions[np.dtype(name)] = function
    return functions
