"""Batches that are not worth dividing: plain Theano computes them whole."""
import math
import statistics
import time

from ..devices.context_map import HOST
from ..distributed.activities import SHARE

WARM_UP = 3        # calls before those that count: kernels are built, buffers are allocated
COUNTED = 5        # calls that count, divided and whole
TRIED = 3          # whole calls after which it gives up if all but the first, which compiles, took longer
LONGEST = 10e-3    # seconds; for a call that takes longer over the contexts, plain Theano is not even compiled


def on_devices(contexts):
    """Return whether any of the contexts is on a device other than the CPU."""
    return any(context.kind != 'cpu' for context in contexts)


class Dispatch:
    """Runs each batch by what is faster for its length: the contexts, or a plain function.

    The first calls with batches of about the same length are timed: over the contexts and, if they are short, whole.
    Each of these calls computes the usual results. What is found out counts for shorter, or longer, batches, too.

    Parameters
    ----------
    divided : callable
        ``divided(inputs)`` computes a batch over the contexts.
    make_plain : callable
        Makes the plain function, a callable of the same argument, when it is first needed.
    contexts : list of Context
    ranks : Communicator
        The processes that make the same calls. Whole batches are computed by each; the slowest one's time counts.
    note_whole : callable
        ``note_whole(samples)`` is called when it is found out that batches of fewer samples are better computed whole.

    Attributes
    ----------
    ran_on : list of Context or None
        What the plain function ran the last batch on; None if it was divided.
    """

    def __init__(self, divided, make_plain, contexts, ranks, note_whole):
        self._divided, self._make_plain, self._plain = divided, make_plain, None
        self._ranks, self._note_whole = ranks, note_whole
        self._host = [HOST] if on_devices(contexts) else contexts[:1]
        self._whole_below, self._divided_from = 0, math.inf
        self._seconds = {}  # bits of the length -> seconds of the calls over the contexts, and of the whole ones
        self.ran_on = None

    def run(self, inputs, samples):
        """Compute a batch of a number of samples."""
        if samples < self._whole_below:
            return self._run_whole(inputs)
        if samples >= self._divided_from:
            return self.run_divided(inputs)
        return self._measure(inputs, samples.bit_length())

    def run_divided(self, inputs):
        self.ran_on = None
        return self._divided(inputs)

    def _run_whole(self, inputs):
        if self._plain is None:
            self._plain = self._make_plain()
        self.ran_on = self._host
        return self._plain(inputs)

    def _measure(self, inputs, bits):
        divided, whole = self._seconds.setdefault(bits, ([], []))
        is_first = len(divided) < WARM_UP + COUNTED
        began = time.perf_counter()
        results = (self.run_divided if is_first else self._run_whole)(inputs)
        nanoseconds = round((time.perf_counter() - began) * 1e9)
        found = self._ranks.handshake((SHARE, bits, len(divided) + len(whole)), [nanoseconds])
        (divided if is_first else whole).append(found.max() * 1e-9)
        if len(divided) == WARM_UP + COUNTED:
            taken = statistics.median(divided[WARM_UP:])
            is_tried = len(whole) == WARM_UP + COUNTED
            if is_tried and taken > statistics.median(whole[WARM_UP:]):
                self._whole_below = 1 << bits
                self._note_whole(self._whole_below)
            elif is_tried or taken > LONGEST or len(whole) >= TRIED and min(whole[1:]) > taken:
                self._divided_from = 1 << (bits - 1)
        return results
