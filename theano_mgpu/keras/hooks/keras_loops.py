"""Hooks in Keras's training loops, which report the batches that come next.

Keras 2.3.1's loops take a batch only after the step before it has ended. With these hooks a step can send the next
batch to the devices while the current one is computed.
"""
from __future__ import annotations

import threading
from typing import Any

from ...compat import keras_versions
from ...compat.wrapping import wrap


class Running(threading.local):
    """The loop that this thread runs: a generator may predict in a thread of its own."""

    batches: Any = None  # receives the reports: a LoopObserver of `prefetch`


running = Running()


def report_slices(module: Any) -> None:
    """Report each slice of the arrays that a loop takes as a batch.

    The loops are in `keras.engine.training_arrays`; before Keras 2.2 in `keras.engine.training`.
    """
    def slice_arrays(original, arrays, start=None, stop=None):
        if running.batches is None or stop is not None:
            return original(arrays, start, stop)
        return running.batches.slice(original, arrays, start)
    for name in {'slice_arrays', '_slice_arrays', 'slice_X'}.intersection(vars(module)):
        wrap(module, name)(slice_arrays)


def report_queues(data_utils: Any) -> None:
    """Report the queues from which loops over generators and Sequences take batches.

    A Feed of `feed` sends each batch that is taken from its queue to other processes.
    """
    names = 'OrderedEnqueuer', 'GeneratorEnqueuer'  # Keras 1 has neither
    for enqueuer in [vars(data_utils)[name] for name in names if name in vars(data_utils)]:
        @wrap(enqueuer)
        def get(original, self):
            source = getattr(self, 'sequence', None)
            if hasattr(source, 'taken_from') and keras_versions.has_open_queues():
                return source.taken_from(self, original(self))
            if running.batches is not None and keras_versions.has_open_queues():
                running.batches.queue(self)
            return original(self)
