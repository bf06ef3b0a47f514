"""Hooks in Keras's training loops, which report the batches that come next.

Keras 2.3.1's loops take a batch only after the step before it has ended. With these hooks a step can send the next
batch to the devices while the current one is computed.
"""
from __future__ import annotations

from typing import Any

from .wrapping import wrap

keras_batches: Any = None  # receives the reports while a loop runs: a LoopObserver of theano_mgpu.keras.prefetch


def report_slices(training_arrays: Any) -> None:
    """Report each slice of the arrays that a loop takes as a batch."""
    @wrap(training_arrays)
    def slice_arrays(original, arrays, start=None, stop=None):
        if keras_batches is None or stop is not None:
            return original(arrays, start, stop)
        return keras_batches.slice(original, arrays, start)


def report_queues(data_utils: Any) -> None:
    """Report the queues from which loops over generators and Sequences take batches.

    A Feed of theano_mgpu.keras.feed sends each batch that is taken from its queue to other processes.
    """
    names = 'OrderedEnqueuer', 'GeneratorEnqueuer'  # Keras 1 has neither
    for enqueuer in [vars(data_utils)[name] for name in names if name in vars(data_utils)]:
        @wrap(enqueuer)
        def get(original, self):
            taken_from = getattr(getattr(self, 'sequence', None), 'taken_from', None)  # not before Keras 2.2
            if taken_from is not None:
                return taken_from(self, original(self))
            if keras_batches is not None:
                keras_batches.queue(self)
            return original(self)
