"""The bytes of the values of shared variables."""
from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np
from theano.compile.sharedvalue import SharedVariable


def bytes_of_shared(variable: SharedVariable) -> int:
    """Return the bytes of the value of a shared variable; 0 for a value that is no array."""
    value = variable.container.storage[0]
    return value.size * np.dtype(value.dtype).itemsize if hasattr(value, 'size') and hasattr(value, 'dtype') else 0


def bytes_of_all(variables: Iterable[SharedVariable]) -> int:
    """Return the bytes of the values of shared variables together."""
    return sum(map(bytes_of_shared, variables))


def parts_by_bytes(sizes: Sequence[int], n: int) -> list[int]:
    """Return the number of one of n parts for each of some sizes, in their order, with about as many bytes a part.

    Examples
    --------
    >>> parts_by_bytes([3, 1, 4], 2)
    [0, 0, 1]
    """
    total, ends = sum(sizes) or 1, np.cumsum(sizes)
    return [min(n - 1, int(n * (end - size / 2) / total)) for size, end in zip(sizes, ends)]
