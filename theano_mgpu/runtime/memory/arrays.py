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
        size = math.prod(map(int, shape)) * np.dtype(dtype).itemsize
        return Array(Block(self, size), tuple(shape), np.dtype(dtype))

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


class Block:
    """Some bytes of a memory. They are freed when nothing refers to the block any more, as with a GpuArray."""

    __slots__ = 'memory', 'size'

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.now += size
        memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.size


class Array:
    """An array without content.

    It shares the `block` of its memory with views of it. The `value` is the content, where it is known: of some whole
    numbers.
    """

    __slots__ = 'block', 'shape', 'dtype', 'is_contiguous', 'value'
    gpudata = 0  # the address

    def __init__(self, block: Block, shape: Shape, dtype: np.dtype, is_contiguous: bool = True,
                 value: np.ndarray | None = None) -> None:
        self.block, self.shape, self.dtype, self.is_contiguous, self.value = block, shape, dtype, is_contiguous, value

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

    def view(self, shape: Shape, is_contiguous: bool = True) -> Array:
        """Return a view of the same memory."""
        return Array(self.block, shape, self.dtype, is_contiguous)

    reshape = view  # as of an array of NumPy or pygpu

    def __getitem__(self, rows: slice) -> Array:
        return self.view((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), self.is_contiguous)
