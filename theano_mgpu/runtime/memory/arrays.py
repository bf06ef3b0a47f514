"""Arrays without content: they have a shape, and memory that is counted as long as they are referred to."""
from __future__ import annotations

import math
from typing import Any, Sequence, Tuple

import numpy as np

Shape = Tuple[int, ...]


class Memory:
    """The count of the bytes of a device: `now` in use, and at the `peak` of all times."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return a new array."""
        return Array(self, tuple(map(int, shape)), np.dtype(dtype))

    empty = zeros = array  # as of `OnDevice`

    def add(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Return arrays for the sums of lists of arrays."""
        return [each if each is None else self.array(each.shape, each.dtype) for each in values[0]]

    def wait(self) -> None:
        """Wait for nothing."""

    def kernel(self, *given: Any) -> Any:
        """Return a kernel that computes nothing."""
        return lambda *arrays: None

    def contiguous(self, array: Array) -> Array:
        """Return an array if it is C-contiguous, or else a copy."""
        return array if array.is_contiguous else self.array(array.shape, array.dtype)


class Array:
    """An array without content. Its memory is freed when nothing refers to it any more, as with a GpuArray.

    A view of another array, its `base`, has no memory of its own. The `value` is the content, where it is known: of
    some whole numbers.
    """

    __slots__ = 'memory', 'shape', 'dtype', 'is_contiguous', 'value', 'base'
    gpudata = 0  # the address

    def __init__(self, memory: Memory, shape: Shape, dtype: np.dtype, base: Array | None = None,
                 is_contiguous: bool = True, value: np.ndarray | None = None) -> None:
        self.memory, self.shape, self.dtype, self.base = memory, shape, dtype, base
        self.is_contiguous, self.value = is_contiguous, value
        if base is None:
            memory.now += self.nbytes
            memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        if self.base is None:
            self.memory.now -= self.nbytes

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.dtype.itemsize * self.size

    def write(self, array: Any) -> None:
        """Take the content of another array."""

    def view(self, shape: Shape, is_contiguous: bool = True, value: np.ndarray | None = None) -> Array:
        """Return a view of the same memory."""
        return Array(self.memory, shape, self.dtype, self, is_contiguous, value)

    reshape = view  # as of an array of NumPy or pygpu

    def __getitem__(self, rows: slice) -> Array:
        return self.view((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), self.is_contiguous)
