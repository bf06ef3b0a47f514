"""An estimate: the bytes that each device holds in a step, from the compiled functions and the shapes of a batch."""
from __future__ import annotations

from typing import Any, Callable, Mapping

import numpy as np

from ...devices.context_map import HOST, Context
from ...devices.contexts import gpu_context
from ...errors import warn
from ...plan.memory import MemoryEstimate
from ...plan.shares import equal_sizes, weighted_sizes
from ..batch import Splitter
from ..executable import Executable
from .dry_run import DryRun
from .function import DryFunction
from .shapes import UnknownShape

STEPS = 2         # the second one has arrays that the first has left, and the memory for two batches of inputs
SLICES = 4        # from three on, the number changes nothing: a slice, the one before it, and the sums of the others
MOST = 1 << 26    # samples of a batch; larger ones are not asked for


class DryStep:
    """The steps of an executable, without their computation; the splitter knows the shapes of the first batch.

    Each is a `DryRun`, which counts the bytes that a device has to allocate. It does not count the blocks in
    libgpuarray's cache of freed memory.
    """

    def __init__(self, executable: Executable, splitter: Splitter) -> None:
        self._executable, self._plan, self._like = executable, executable.plan, splitter
        self._functions: dict[Any, DryFunction] = {}
        self._known: dict[Any, Any] = {}  # the peaks by the number of samples and slices

    def estimate(self) -> MemoryEstimate | None:
        """Return the peaks of a step with the first batch, of devices other than the CPU, and the batches that fit.

        Return None before the first batch, or if the shape of a value is not known before it is computed.
        """
        devices = [context for context in self._plan.mesh.contexts if context.kind != 'cpu']
        shares, first = self._plan.shares, self._like.first
        counted = self._counted(sum(first), self._like.slices.get(first)) if self._like.shapes is not None else None
        if counted is None:
            return None
        peaks, sizes = counted
        totals = {context: gpu_context(context).total_gmem for context in devices}
        largest = {context: self.largest({context: total}) for context, total in totals.items()}
        in_slices = self.largest(totals, SLICES) if devices and shares.grows and shares.is_divided else None
        part = in_slices and max(self._like.shares.sizes(self._lengths(in_slices)))
        return MemoryEstimate({context: peaks[context] for context in devices}, totals, largest,
                              part and equal_sizes(part, SLICES)[0],
                              not any(each.has_dnn for each in self._functions.values()), peaks[HOST], sizes)

    def peaks(self, samples: int, slices: int | None = None) -> dict[Context, int] | None:
        """Return the most bytes that each context's device has in use at one time, for whole batches of some samples.

        They are computed in `slices` in place of the plan's micro-batches. Return None if the shape of a value is not
        known before it is computed.
        """
        counted = self._counted(samples, slices)
        return counted and counted[0]

    def _counted(self, samples, slices):
        """Return the peaks, and the bytes of each value; None as for `peaks`."""
        key = samples, slices, self._like.shares.weights
        try:
            if key not in self._known:
                self._known[key] = self._run(samples, slices)
            return self._known[key]
        except UnknownShape:
            return None
        except Exception as error:  # an op that the dry run does not understand must not stop a training
            warn('the memory of %s cannot be estimated: %s: %s' % (self._plan.name or 'a function',
                                                                  type(error).__name__, error))
            return None

    def _run(self, samples, slices):
        shares, lengths = self._plan.shares, self._lengths(samples)
        own = lengths[shares.machine.rank] if shares.is_sharded else samples
        dry = DryRun(self._executable, self._functions)
        splitter = Splitter(self._plan, self._like.with_samples, self._executable.parts)
        splitter.use(self._like.shares)
        if slices is not None:
            splitter.slices[tuple(lengths)] = slices
        values = {variable: self._value(variable, own, dry.memory[HOST]) for variable in self._plan.program.given}
        for _ in range(STEPS):
            batch = splitter.split(values.items(), lengths)
            dry.run(batch)
        return {context: memory.peak for context, memory in dry.memory.items()}, {
            variable: dry.sizes[slot] for variable, slot in batch.split.program.slots.items() if slot in dry.sizes}

    def _value(self, variable, length, host):
        """Return an input like the one in the first batch, for a batch of some length."""
        if variable in self._like.whole_numbers:
            return np.array(self._like.whole_numbers[variable], variable.dtype)
        shape = self._like.shapes[variable]
        if variable in self._like.with_samples:
            shape = length, *shape[1:]
        return host.array(shape, getattr(variable.type, 'dtype', 'int8'))

    def _lengths(self, samples):
        """Return the samples that each rank is given of some samples: of its own, or the whole batch."""
        shares = self._plan.shares
        return weighted_sizes(samples, [1] * shares.machine.size) if shares.is_sharded else [samples]

    def largest(self, limits: Mapping[Context, int], slices: int | None = None) -> int | None:
        """Return the samples of the largest batch whose peaks are within limits, in bytes; 0 if none is.

        Return None if the peaks are not known, or if any batch is within the limits.
        """
        def excess(samples: int) -> int:
            peaks = self.peaks(samples, slices)
            assert peaks is not None
            return max(peaks[context] - limit for context, limit in limits.items())
        return None if self.peaks(1, slices) is None else last_within(excess, MOST)


def last_within(excess: Callable[[int], Any], most: int) -> int | None:
    """Return the last whole number from 1 on with an excess of at most 0; 0 if there is none, None if it is `most`.

    The excess grows with the number, about as a straight line.

    Examples
    --------
    >>> last_within(lambda n: 3 * n - 100, 1000), last_within(lambda n: n, 9), last_within(lambda n: n - 99, 9)
    (33, 0, None)
    """
    low, high = 0, 1
    while excess(high) <= 0:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    is_bisection = False
    while high - low > 1:
        middle = (low + high) // 2
        if low and not is_bisection:  # along the line through both ends
            below, above = -excess(low), excess(high)
            middle = min(max(low + (high - low) * below // (below + above), low + 1), high - 1)
        is_bisection = not is_bisection and high - low > 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return low
