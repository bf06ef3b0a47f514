"""Edits in place of memory that a shared variable has borrowed, and that replicas on devices have copies of.

Theano documents that, on the CPU, an edit of the array in ``theano.shared(array, borrow=True)`` counts from the next
call on. A replica on the host has the same memory. A replica on a device has a copy, so the edit has to be noticed.
"""
from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ...errors import named, warn

LARGE = 4 << 20  # bytes; the checksum of more takes 1 ms or longer


def is_lent(storage: Any, key: Any = 0) -> bool:
    """Return whether an owner besides a shared variable refers to its value, or to the memory of its value.

    The value is an item of `storage`, the list of a shared variable, or the dict of a sparse matrix.

    >>> array = np.zeros(6)
    >>> is_lent([array]), is_lent([np.zeros(6)]), is_lent([array[2:]]), is_lent([np.zeros(6)[2:]])
    (True, False, True, False)
    """
    value = storage[key]
    if isinstance(value, np.ndarray) and not value.flags.writeable and not isinstance(value.base, np.ndarray):
        return False  # nobody edits it
    if sys.getrefcount(value) > 3:  # the storage, this name, and the argument
        return True
    if hasattr(value, 'indptr'):  # a sparse matrix
        return any(is_lent(vars(value), part) for part in ('data', 'indices', 'indptr'))
    while isinstance(getattr(value, 'base', None), np.ndarray):
        value = value.base
        if sys.getrefcount(value) > 3:  # the view, this name, and the argument
            return True
    # Memory of another owner, such as a file that is mapped: who refers to it is not known.
    return isinstance(value, np.ndarray) and value.base is not None and value.flags.writeable


def warn_if_large(variable: Any) -> None:
    """Warn that each call compares a shared variable's value, whose memory the script refers to, if that takes long."""
    size = getattr(variable.container.storage[0], 'nbytes', 0)
    if size > LARGE:
        warn('the script refers to the memory of the shared variable %s (%d MB), which it may edit in place: each '
             'call compares the memory with what it was, which takes about %d ms. Delete the other '
             'references to the array, or make the variable without borrow=True'
             % (named(variable), size >> 20, size >> 22))
