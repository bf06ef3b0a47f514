"""Memory of the host, which stays with the process when a computation frees it, for the next step to use again."""
from __future__ import annotations

import ctypes
import os

# glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
SETTINGS = ('MALLOC_TRIM_THRESHOLD_', 'MALLOC_TOP_PAD_', 'MALLOC_MMAP_MAX_', 'MALLOC_MMAP_THRESHOLD_', 'GLIBC_TUNABLES')


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep large blocks that are freed; return whether it has accepted that.

    Theano frees each intermediate array as soon as it is used up. By default glibc returns an array of megabytes to the
    system at once and asks for it again in the next step, when each of its pages is cleared and mapped anew: in the
    small CNN of the benchmarks that is two fifths of the time. The process then keeps the memory of its peak. Nothing
    is done without glibc, or where the user has settings of malloc in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])
