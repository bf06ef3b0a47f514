"""The memory that the steps of a plan take on each device, as a dry run of the compiled plan has counted it."""
from __future__ import annotations

from typing import Mapping, NamedTuple

import theano

from ..devices.context_map import Context


class MemoryEstimate(NamedTuple):
    """The most bytes that each device has in use at one time, and the batches that fit.

    Attributes
    ----------
    peaks : dict of Context to int
        Bytes, for the first batch.
    totals : dict of Context to int
        The bytes of each device.
    largest : dict of Context to (int or None)
        Samples of the largest batch that fits in each device's memory at once; None if any does.
    slice : int or None
        Samples of the largest slice that fits in the memory of every device, where batches are computed in slices.
    is_whole : bool
        Whether all is counted; without it, the workspaces of cuDNN are not, which it chooses when it runs.
    host : int
        Bytes of the values on the host at one time; the contexts on the CPU share them.
    sizes : dict of theano.Variable to int
        Bytes of the values of a step, in the first shard of this process.
    """

    peaks: dict[Context, int]
    totals: dict[Context, int]
    largest: dict[Context, int | None]
    slice: int | None = None
    is_whole: bool = True
    host: int = 0
    sizes: Mapping[theano.Variable, int] = {}

    @property
    def largest_batch(self) -> int | None:
        """The number of samples of the largest batch that fits in the memory of every device."""
        known = [samples for samples in self.largest.values() if samples is not None]
        return min(known, default=None)
