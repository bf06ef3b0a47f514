"""Page-locked memory on the host: a CUDA device copies to it at full speed, while the host does something else."""
from __future__ import annotations

import ctypes
import weakref
from typing import Any, Sequence

import numpy as np

from .context_map import Context
from .contexts import primary_context
from .cuda_driver import load_driver


def zeros(shape: int | tuple[int, ...], dtype: Any, contexts: Sequence[Context]) -> np.ndarray:
    """Return a new array of 0 that devices of contexts copy to and from.

    It is in page-locked memory if the devices are of CUDA, and the host has enough of it. pygpu's `read` into such an
    array returns at once: the array has the values after `sync`. The memory is freed once no context copies any more.
    """
    dtype, n = np.dtype(dtype), int(np.prod(shape, dtype='int64'))
    size = n * dtype.itemsize
    if size and all(context.kind == 'cuda' for context in contexts):
        driver = load_driver()
        primary = list(map(primary_context, contexts))
        address = driver.allocate_host(primary[-1], size)
        if address:
            memory = (ctypes.c_char * size).from_address(address)
            weakref.finalize(memory, driver.free_host, primary, address).atexit = False
            array = np.frombuffer(memory, dtype, n).reshape(shape)
            array[...] = 0
            return array
    return np.zeros(shape, dtype)
