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
    if n and all(context.kind == 'cuda' for context in contexts):
        bytes_ = memory(n * dtype.itemsize, contexts)
        if bytes_ is not None:
            bytes_[...] = 0
            return bytes_.view(dtype).reshape(shape)
    return np.zeros(shape, dtype)


def memory(size: int, contexts: Sequence[Context]) -> np.ndarray | None:
    """Return new page-locked memory for CUDA contexts, as bytes; None if the host has too little of it."""
    driver, primary = load_driver(), list(map(primary_context, contexts))
    address = driver.allocate_host(primary[-1], size)
    if not address:
        return None
    array: Any = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, driver.free_host, primary, address).atexit = False
    return np.frombuffer(array, 'uint8')
