"""The steps of the functions of Keras models: a count for the summary, and the choice of one device or several."""
from __future__ import annotations

from time import perf_counter
from typing import Any, Callable, Sequence

import numpy as np

from ..devices.context_map import HOST, Context
from ..runtime.steps import Computed
from .chooser import LengthChooser, Way
from .model_report import Usage


def count(usage: Usage, kind: str, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
    """Count a batch for the summary: a step, once the first two arguments are bound."""
    began = perf_counter()
    computed = proceed(inputs)
    usage.add(kind, computed.samples, perf_counter() - began, computed.contexts)
    return computed


class Choice:
    """A step that computes some batches on one device, by the time that batches of their length take.

    Where they are short, this is plain Keras, on the host; else it is the first of the contexts, whose device is like
    the others. Ranks have to choose alike. So they compare their inputs while calls are timed, and once these differ.
    """

    def __init__(self, chooser: LengthChooser, function: Any, contexts: list[Context]) -> None:
        self._chooser, self._function = chooser, function
        self._host = [HOST] if on_devices(contexts) else contexts[:1]

    def __call__(self, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
        samples, leading = length_of(inputs), self._function.leading
        is_open = self._chooser.is_open(samples)
        if leading.differ or is_open:
            inputs = leading(samples, inputs)[1]
            samples = length_of(inputs)

        def compute(way):
            if way is Way.SEVERAL:
                computed = proceed(inputs)
                return computed, computed.step is None or computed.step.is_settled
            if not self._chooser.is_long(samples):
                return Computed(self._function.plain(inputs), samples, self._host), True
            try:
                return self._function.on_first(inputs), True
            except Exception as error:
                if getattr(error, 'out_of_memory', False):  # several contexts have more memory
                    self._chooser.divide(samples)
                return proceed(inputs), False
        return self._chooser.run(samples, compute)


def on_devices(contexts: Sequence[Context]) -> bool:
    """Return whether any of the contexts is on a device other than the CPU."""
    return any(context.kind != 'cpu' for context in contexts)


def length_of(inputs: list[Any]) -> int:
    """Return the number of samples of a batch; 0 if it has none."""
    shape = getattr(inputs[0], 'shape', None) or np.shape(inputs[0]) if inputs else ()  # np.shape takes long
    return shape[0] if shape else 0
