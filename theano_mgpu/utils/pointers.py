"""Arrays of pointers, for functions of C."""
from __future__ import annotations

import ctypes
from typing import Any, Iterable

import numpy as np


def pointers(addresses: Iterable[int | None]) -> Any:
    """Return an array of pointers to void, for addresses as integers; None is a null pointer."""
    addresses = list(addresses)
    return (ctypes.c_void_p * len(addresses))(*addresses)


def pointers_to(arrays: Iterable[np.ndarray]) -> Any:
    """Return an array of pointers to the memory of arrays, which has to live as long as these are used."""
    return pointers(array.ctypes.data for array in arrays)
