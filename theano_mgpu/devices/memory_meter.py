"""The memory that steps take on CUDA devices, by the lengths of their batches."""
from __future__ import annotations

import collections
from typing import Sequence

import theano

from .context_map import Context
from .contexts import gpu_context

STEPS = 3  # of a length: the second one sends a batch ahead, and the third one has room for both


class Meter:
    """The memory of each device that the first steps on batches of each length have taken anew.

    libgpuarray keeps the blocks that are freed, and does not join them. So the memory in use after a step is the most
    that was in use in it, with the workspaces of cuDNN and the memory of NCCL, and a longer batch takes all of its
    memory anew. All processes count.

    Attributes
    ----------
    before : dict of Context to int
        Bytes in use before the first step; without the contexts whose memory cannot be measured.
    used : dict of Context to int
        Bytes in use after the last step that was looked at.
    taken : dict of Context to dict of int to int
        Bytes that steps have taken anew, by the samples of the batch on all ranks.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.before = {context: used(context) for context in contexts if is_measured(context)}
        self.used = dict(self.before)
        self.taken: dict[Context, collections.Counter[int]] = {
            context: collections.Counter() for context in self.before}
        self._steps: collections.Counter[int] = collections.Counter()

    def note(self, samples: int) -> None:
        """Note the memory in use, after one of the first steps on batches of some samples."""
        if self.before and self._steps[samples] < STEPS:
            self._steps[samples] += 1
            for context, taken in self.taken.items():
                now = used(context)
                taken[samples] += now - self.used[context]
                self.used[context] = now


def is_measured(context: Context) -> bool:
    """Return whether the memory that a context's device has in use tells what its steps need."""
    return context.kind == 'cuda' and theano.config.gpuarray.preallocate == 0


def total(context: Context) -> int:
    """Return the bytes of a device."""
    return gpu_context(context).total_gmem


def used(context: Context) -> int:
    """Return the bytes that are in use on a CUDA device, by all processes."""
    opened = gpu_context(context)
    return opened.total_gmem - opened.free_gmem
