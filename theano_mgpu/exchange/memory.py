"""The memory of a context, in which parts of sums are added."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..comm.tree import add_arrays, folded
from ..devices import page_locked
from ..devices.context_map import Context
from ..devices.transfers import DeviceMemory, Fetcher


class OnHost:
    """The memory of the host."""

    def add(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the sums of lists of arrays: of the last list and the one before it first, and so on; None stays."""
        sums = [each if each is None else np.empty_like(each) for each in values[0]]
        for *terms, out in zip(*values, sums):
            if out is not None:
                add_arrays(terms, out)
        return sums


class OnDevice(DeviceMemory):
    """The memory of a context's device."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._kernels: dict[Any, Any] = {}
        self._any = self.empty((1,), 'float32')

    def wait(self) -> None:
        """Wait for all that the device has to do: libgpuarray waits for the stream of an array."""
        self._any.sync()

    def add(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the sums of lists of arrays, in new memory, as `OnHost.add`; each addition is rounded."""
        return [folded(terms, self._added) for terms in zip(*values)]

    def _added(self, one, other):
        total, size = self.empty(one.shape, one.dtype), (int(np.prod(one.shape, dtype='int64')),)
        if all(size):
            self.kernel(one.dtype.name, 'n0 + n1', 2)(*[self.contiguous(each).reshape(size)
                                                        for each in (total, one, other)])
        return total

    def kernel(self, dtype: str, order: str, n: int) -> Any:
        """Return the kernel ``kernel(total, n0, n1, ...)`` that adds n arrays with one axis in an order."""
        key = dtype, order
        if key not in self._kernels:
            from pygpu.elemwise import GpuElemwise, arg  # not installed on every machine without a GPU
            terms = [arg('n%d' % i, dtype, read=True) for i in range(n)]
            total = arg('total', dtype, write=True)
            self._kernels[key] = GpuElemwise(self.context, 'total = ' + order, [total, *terms], nd=1, convert_f16=True)
        return self._kernels[key]


class Memories(dict):
    """The memory of each context, made when it is asked for."""

    computes = True  # whether arrays have content

    def __missing__(self, context: Context) -> Any:
        self[context] = memory = OnHost() if context.kind == 'cpu' else OnDevice(context)
        return memory

    def fetcher(self, context: Context) -> Any:
        """Return a new Fetcher from a context."""
        return Fetcher(context)

    def on_host(self, shape: Sequence[int], dtype: Any, context: Context) -> Any:
        """Return new zeros on the host, for copies from and to a context."""
        return page_locked.zeros(tuple(shape), dtype, context)
