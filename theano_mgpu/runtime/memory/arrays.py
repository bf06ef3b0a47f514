"""Arrays without content: they have a shape, strides, and memory that is counted as long as they are referred to."""
from __future__ import annotations

from typing import Any, Sequence, Tuple

import numpy as np

Shape = Tuple[int, ...]


class Memory:
    """The count of the bytes of a device.

    Attributes
    ----------
    now : int
        Bytes in use.
    peak : int
        The most bytes that were in use at one time.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return a new C-contiguous array."""
        dtype, shape = np.dtype(dtype), tuple(shape)
        return Array(Block(self, dtype.itemsize * int(np.prod(shape, dtype='int64'))), shape,
                     c_strides(shape, dtype.itemsize), dtype)

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
    """Some bytes of a memory. They are freed when nothing refers to the block any more, as with a GpuArray.

    Parameters
    ----------
    memory : Memory
    size : int
        Bytes.
    """

    __slots__ = 'memory', 'size'

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.now += size
        memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.size


class Array:
    """An array without content.

    Parameters
    ----------
    block : Block
        The memory, which it may share with views of it.
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : np.dtype

    Attributes
    ----------
    value : ndarray or None
        The content, where it is known: of some whole numbers.
    """

    __slots__ = 'block', 'shape', 'strides', 'dtype', 'value'
    gpudata = 0  # the address

    def __init__(self, block: Block, shape: Shape, strides: Shape, dtype: np.dtype) -> None:
        self.block, self.shape, self.strides, self.dtype = block, shape, strides, dtype
        self.value: Any = None

    @property
    def size(self) -> int:
        """The number of its elements."""
        return int(np.prod(self.shape, dtype='int64'))

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.dtype.itemsize * self.size

    def write(self, array: Any) -> None:
        """Take the content of another array."""

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie one after the other, the last axis first."""
        expected = c_strides(self.shape, self.dtype.itemsize)
        return 0 in self.shape or all(size == 1 or stride == wanted for size, stride, wanted in
                                      zip(self.shape, self.strides, expected))

    def view(self, shape: Shape, strides: Shape) -> Array:
        """Return a view of the same memory."""
        return Array(self.block, tuple(shape), tuple(strides), self.dtype)

    def part(self, shape: Shape) -> Array:
        """Return a view of some of the elements, C-contiguous."""
        return self.view(shape, c_strides(shape, self.dtype.itemsize))

    def __getitem__(self, rows: slice) -> Array:
        return self.view((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), self.strides)

    def reshaped(self, shape: Shape) -> Array | None:
        """Return a view of another shape; None if the elements would have to be copied."""
        if self.is_contiguous:
            return self.part(shape)
        strides = reshaped_strides(self.shape, self.strides, shape)
        return None if strides is None else self.view(shape, strides)

    reshape = reshaped  # as of an array of NumPy or pygpu


def reshaped_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Return the strides of a view with a new shape; None if there is none.

    NumPy's ``array.shape = new`` copies the elements before it raises an error, so it needs real ones.

    Parameters
    ----------
    shape, strides : tuple of int
        Of an array with elements.
    new : tuple of int
        With as many elements.

    Examples
    --------
    >>> reshaped_strides((2, 3, 4), (48, 16, 4), (2, 12)), reshaped_strides((3, 2), (4, 12), (6,))
    ((48, 4), None)
    """
    old = [(size, stride) for size, stride in zip(shape, strides) if size > 1]
    found: list[int] = []
    first = start = 0  # the next axes, old and new
    while start < len(new):
        if new[start] == 1:
            found.append(0)
            start += 1
            continue
        # The fewest axes, old and new, that have as many elements together.
        stop, last, wanted, elements = start + 1, first + 1, new[start], old[first][0]
        while wanted != elements:
            if wanted < elements:
                wanted *= new[stop]
                stop += 1
            else:
                elements *= old[last][0]
                last += 1
        axes = old[first:last]
        if any(outer != size * inner for (_, outer), (size, inner) in zip(axes, axes[1:])):
            return None
        found += [axes[-1][1] * stride for stride in c_strides(new[start:stop], 1)]
        first, start = last, stop
    return tuple(found)


def c_strides(shape: Sequence[int], itemsize: int) -> Shape:
    """Return the strides, in bytes, of a C-contiguous array.

    Examples
    --------
    >>> c_strides((2, 3), 4)
    (12, 4)
    """
    strides = [itemsize]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1]) if shape else ()
