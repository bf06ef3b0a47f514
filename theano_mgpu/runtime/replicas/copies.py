"""Copies of a shared variable on contexts, and their values."""
from __future__ import annotations

import copy
from typing import Any, Collection

import numpy as np
import theano
from theano.gpuarray.type import GpuArrayType
from theano.tensor.sharedvar import TensorSharedVariable

from ...devices.context_map import Context
from ...devices.contexts import check_process
from ...graph.graph import fits_gpu, host_type


def host_value(shared: Any) -> Any:
    """Return a copy of a shared variable's value on the host, without asking its watcher."""
    value = shared.container.storage[0]
    return np.asarray(value) if isinstance(shared.type, GpuArrayType) else copy.deepcopy(value)


def current_value(copies: Collection[Any]) -> Any:
    """Return the value of variables that are equal, on the host; a copy on a lost device is passed over.

    It is a ContextError in a fork of the process that has them on a device.
    """
    # Copies on the host come first: they cost least.
    copies = sorted(copies, key=lambda shared: isinstance(shared.type, GpuArrayType))
    if isinstance(copies[0].type, GpuArrayType):
        check_process()
    for shared in copies[:-1]:
        try:
            return host_value(shared)
        except Exception:  # pygpu's GpuArrayException: the step in which the device failed has reported it
            continue
    return host_value(copies[-1])


def lies_on_device(context: Context, variable: Any) -> bool:
    """Return whether a context's replica of a shared variable lies on its device, and not on the host."""
    on_gpu = context.kind != 'cpu' and (fits_gpu(variable) or isinstance(variable.type, GpuArrayType))
    return on_gpu and variable.type.ndim > 0  # scalars stay on the host, where Theano keeps them too


def copy_on(context: Context, variable: Any, value: Any) -> Any:
    """Return a new shared variable on a context, of the user's variable's type; the value is not copied on the host."""
    if lies_on_device(context, variable):
        return theano.shared(value, name=variable.name, target=context.name,
                             broadcastable=variable.type.broadcastable)
    if isinstance(variable.type, GpuArrayType):
        return TensorSharedVariable(variable.name, host_type(variable), value, strict=True)
    return variable.__class__(variable.name, variable.type, value, strict=True)
