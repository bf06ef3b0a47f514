"""The largest batch that fits in the memory of each device, by a line through measured points."""
from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from theano.compile.sharedvalue import SharedVariable

from ..devices.context_map import Context
from ..devices.memory_meter import Meter, total
from ..graph.graph import bytes_of_all, shared_variables
from .buckets import bytes_of_gradients

LEAST = 1 << 25  # bytes that a step has to take, to tell of others: libgpuarray takes blocks of 4 MiB


class MemoryEstimate(NamedTuple):
    """The memory of each device whose memory is measured, and the batches that fit.

    Attributes
    ----------
    used, totals : dict of Context to int
        The most bytes that were in use after a step, and all bytes of the device.
    largest : dict of Context to int
        Samples of about the largest batch that fits at once; without devices whose memory in use no step has changed.
    """

    used: dict[Context, int]
    totals: dict[Context, int]
    largest: dict[Context, int]

    @property
    def largest_batch(self) -> int | None:
        """The samples of about the largest batch that fits in the memory of every device; None if that is not known."""
        return min(self.largest.values(), default=None) if self.largest.keys() == self.used.keys() else None


def estimated(plan: Any, meter: Meter) -> MemoryEstimate | None:
    """Return what the steps of a plan, and their memory, tell of larger batches.

    Return None before the first step, and where there is no device but the CPU.
    """
    measured = [context for context, taken in meter.taken.items() if taken]
    if not measured and (meter.taken or not plan.mesh.on_devices):
        return None
    gradients = sum(bytes_of_gradients(plan.program, plan.params).values())
    totals = {context: total(context) for context in measured}
    largest = {context: last_within(totals[context], meter.before[context] + gradients, {
        samples: taken - gradients for samples, taken in meter.taken[context].items()}) for context in measured}
    return MemoryEstimate({context: meter.used[context] for context in measured}, totals,
                          {context: samples for context, samples in largest.items() if samples is not None})


def fixed_bytes(plan: Any, context: Context) -> float:
    """Return about how many bytes a step takes on a context at least, for a batch of any length.

    These are the variables that are read there, new values of those that are updated there, and the sums of gradients.
    """
    updated = dict.fromkeys(v for part in plan.parts if context in part.contexts for v in part.updates)
    return bytes_of_all(variables_on(plan, context)) + bytes_of_all(updated) + \
        sum(bytes_of_gradients(plan.program, plan.params).values())


def variables_on(plan: Any, context: Context) -> list[SharedVariable]:
    """Return the variables that the parts of a context read or update."""
    return shared_variables([each for part in plan.parts if context in part.contexts
                             for each in (*part.graphs, *part.updates.values(), *part.updates)])


def last_within(limit: int, start: float, taken: Mapping[int, float]) -> int | None:
    """Return the samples of the largest batch within a limit of bytes, by the bytes that batches have taken.

    It is on the steepest of the lines from `start`, the bytes in use for no samples. A step may take more than these
    whatever its batch is; then the number is too small. Return None where all have taken too little to tell.

    Examples
    --------
    >>> last_within(10 ** 9, 10 ** 8, {1000: 5e7, 2000: 4e7}), last_within(10 ** 9, 10 ** 8, {1000: 100})
    (18000, None)
    """
    slope = max((n_bytes / samples for samples, n_bytes in taken.items() if n_bytes >= LEAST), default=0)
    return int((limit - start) / slope) if slope else None
