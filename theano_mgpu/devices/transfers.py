"""Arrays from the host to a device and back, and between devices; for a ``cpu`` context no host array is copied."""
from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Iterable, Sequence

import numpy as np
from scipy import sparse
from theano.gpuarray.type import GpuArrayType
from theano.tensor import TensorType

from . import peers
from .context_map import Context
from .contexts import gpu_context
from .copies import LEAST, MOST, inputs_beside

NOTHING = contextlib.nullcontext()


class DeviceMemory:
    """The memory of a context's device."""

    def __init__(self, context: Context) -> None:
        from pygpu import gpuarray  # not installed on every machine without a GPU
        self._gpuarray, self.context = gpuarray, gpu_context(context)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new array without content."""
        return self._gpuarray.empty(shape, dtype, context=self.context)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new array of zeros."""
        return self._gpuarray.zeros(shape, dtype, context=self.context)

    def contiguous(self, array: Any) -> Any:
        """Return an array, of the host or the device, as one piece of memory on the device."""
        if isinstance(array, np.ndarray):
            return self._gpuarray.array(array, context=self.context)
        return array if array.flags.c_contiguous else array.copy(order='C')


class DeviceBuffers:
    """Memory on a context's device that arrays are sent to again and again; not for a ``cpu`` context.

    If it `is_beside`, large arrays are copied beside what the device computes, and may be used in a block of `read`
    alone.
    """

    def __init__(self, context: Context, is_beside: bool = False) -> None:
        self._context = context
        self.arrays: dict[Any, Any] = {}
        self._beside = inputs_beside(context) if is_beside else None
        if self._beside is not None:
            weakref.finalize(self, self._beside.close).atexit = False

    def send(self, key: Any, value: Any) -> Any:
        """Return an array on the device; valid until the next one of the key is sent.

        One that is on the device stays as it is; one of another device is copied, see `copy_to`.
        """
        if not isinstance(value, np.ndarray):
            return copy_to(self._context, value)
        if self._beside is not None and LEAST < value.nbytes <= MOST:
            array = self._beside.send(key, value)
            if array is not None:
                return array
        from pygpu import gpuarray
        buffer = self.arrays.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = gpuarray.array(value, dtype=value.dtype, order='C', context=gpu_context(self._context))
            self.arrays[key] = buffer
        else:
            buffer.write(np.ascontiguousarray(value))
        return buffer

    def read(self) -> Any:
        """Return a ``with`` block in which computations that read the arrays may be enqueued."""
        return self._beside or NOTHING


def copy_to(context: Context, value: Any) -> Any:
    """Return a device's array in another context, copied directly between the devices where libgpuarray can.

    It can with CUDA where `peers.path` is direct; else the copy goes through the host. The call waits until the source
    is computed. A CUDA copy may then still run when the call returns: the next computation of the destination waits for
    it, and so does the next write of the source's device, into the same memory, too. So the source may be changed or
    freed at once.

    The copy is C-contiguous. A value that is in the context already, or on no device, is returned as it is. pygpu
    raises a GpuArrayException if the device has too little free memory, or has failed.
    """
    if not hasattr(value, 'context'):
        return value
    if context.kind == 'cpu':
        return np.asarray(value, order='C')
    there = gpu_context(context)
    if value.context.ptr == there.ptr:
        return value
    if not value.flags.c_contiguous:
        value = value.copy(order='C')  # on its own device: transfer() takes no other arrays, or keeps Fortran order
    value.sync()  # transfer() would wait, too, but block all calls of other threads to the destination meanwhile
    if peers.path(value.context, there) == peers.WRONG:
        return DeviceMemory(context).contiguous(fetch(value))
    return value.transfer(there)


def concatenated(parts: Sequence[Any], axis: int) -> Any:
    """Return arrays, or matrices of scipy.sparse, put together along an axis."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    return (sparse.hstack if axis else sparse.vstack)(parts, parts[0].format, parts[0].dtype)


def wait(values: Iterable[Any]) -> None:
    """Wait until a device has computed arrays; arrays on the host are there already."""
    for value in values:
        if hasattr(value, 'sync'):
            value.sync()


def own_copy(variable: Any, value: Any) -> Any:
    """Return a value of a variable's type, maybe an array on a device, in memory of its own, on the host."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    is_tensor = isinstance(variable.type, (TensorType, GpuArrayType))
    return np.array(fetch(value)) if is_tensor else copy.deepcopy(value)


def fetch(value: Any) -> Any:
    """Return an array on the host; one that is there, and a value of another type, such as a sparse matrix, as it is.
    """
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, 'sync') else value
