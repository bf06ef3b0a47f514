"""Page-locked memory on the host: a CUDA device copies to it at full speed, while the host does something else."""
from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from .context_map import Context
from .contexts import card_of
from .cuda_libraries.driver import load_driver


def zeros(shape: int | tuple[int, ...], dtype: Any, context: Context) -> np.ndarray:
    """Return a new array of 0 that a context's device copies to.

    It is in page-locked memory if the device is one of CUDA, and the host has enough of it. pygpu's `read` into such an
    array returns at once: the array has the values after `sync`.
    """
    dtype, n = np.dtype(dtype), int(np.prod(shape, dtype='int64'))
    size = n * dtype.itemsize
    if context.kind == 'cuda' and size:
        driver = load_driver()
        of_device = driver.primary_context(card_of(context))
        address = driver.allocate_host(of_device, size)
        if address:
            memory = (ctypes.c_char * size).from_address(address)
            weakref.finalize(memory, driver.free_host, of_device, address).atexit = False
            array = np.frombuffer(memory, dtype, n).reshape(shape)
            array[...] = 0
            return array
    return np.zeros(shape, dtype)
