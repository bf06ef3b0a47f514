"""The hook that counts the batches of a Keras model for the summary."""
from __future__ import annotations

from time import perf_counter
from typing import Any, Callable, Sequence

import numpy as np

from ..devices import leases
from ..devices.context_map import Context
from ..runtime.call_hooks import Computed
from .report import Usage


def count(usage: Usage, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
    """Count a batch, for the summary and for the lease of this process: a hook, once the first argument is bound."""
    usage.begin()
    began = perf_counter()
    computed = proceed(inputs)
    seconds = perf_counter() - began
    leases.count(computed.samples, seconds)
    usage.add(computed.samples, seconds, computed.contexts)
    return computed


def on_devices(contexts: Sequence[Context]) -> bool:
    """Return whether any of the contexts is on a device other than the CPU."""
    return any(context.kind != 'cpu' for context in contexts)


def length_of(inputs: list[Any]) -> int:
    """Return the number of samples of a batch; 0 if it has none."""
    shape = getattr(inputs[0], 'shape', None) or np.shape(inputs[0]) if inputs else ()  # np.shape takes long
    return shape[0] if shape else 0
