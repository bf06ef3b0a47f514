"""A trial of NCCL: exchanges whose results are known, of the dtypes that steps send, and of three sizes."""
from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple, Sequence

import numpy as np

from .context_map import Context
from .exchange_operations import BROADCAST, EVERY, MESSAGE, NO_COPIES, Collectives
from .failures import FailureExplained
from .first_exchange import limit
from .nccl_library import DTYPES, SUM
from .transfers import DeviceMemory, fetch

OF_SUMS = 'float32', 'float64'
SIZES = 1, 1 << 12, 1 << 20  # elements: NCCL has a protocol for few bytes, one for some, and one for many
PART = 1 << 8                # of a device's memory: an array of a trial takes no larger one


class Exchanged(NamedTuple):
    """A collective of a trial: what the devices at `places` get is a pattern times a factor."""

    dtype: str
    op: int
    root: int
    target: int
    places: range
    factor: int


class Trial:
    """A trial by the devices of this process, which come from the place `first` on among `size` devices.

    The device at place p sends p + 1 times a pattern of small whole numbers, so that sums have no rounding. Each device
    has memory of at least `least` bytes, which bounds the `sizes` of exchanges, in elements. Raise a ReplicaError if
    one has too little that is free.
    """

    def __init__(self, contexts: Sequence[Context], first: int, size: int, least: int,
                 sizes: Sequence[int] = SIZES) -> None:
        every, last, whole = range(size), size - 1, size * (size + 1) // 2
        self._each = [Exchanged(dtype, SUM, EVERY, EVERY, every, whole) for dtype in OF_SUMS]
        self._each += [Exchanged(dtype, SUM, last, EVERY, every[last:], whole) for dtype in OF_SUMS]
        self._each += [Exchanged('float32', BROADCAST, last, EVERY, every, size),
                       Exchanged('float32', MESSAGE, 0, last, every[last:], 1)]
        self._sizes = sorted({max(1, min(length, least // PART // 8)) for length in sizes})
        self._pattern, self._first = np.arange(self._sizes[-1]) % 251 + 1, first
        self._devices = [self._on(*each, contexts) for each in enumerate(contexts)]

    def _on(self, i, context, contexts):
        """Return what a device sends, and memory for what it gets, of each collective."""
        with FailureExplained(i, context, 'exchange', contexts):
            memory = DeviceMemory(context)
            sent = {dtype: memory.contiguous((self._pattern * (self._first + i + 1)).astype(dtype))
                    for dtype in OF_SUMS}
            return [sent[each.dtype] for each in self._each], [
                memory.zeros(self._pattern.shape, each.dtype) for each in self._each]

    def failure(self, communicator: Any) -> str:
        """Return which result is wrong, or an empty text; raise an ExchangeError if NCCL gives an error."""
        failures = []
        for _, received in self._devices:
            received[-1].sync()  # earlier work of the devices does not count
        for size, op in itertools.product(self._sizes, (SUM, BROADCAST, MESSAGE)):  # other processes wait for each
            communicator.exchange(NO_COPIES, self._collectives(size, op), limit(self._bytes(size, op)))
            communicator.wait()
            failures += self._failures(size, op)
        return next(iter(failures), '')

    @property
    def bytes(self) -> int:
        """The bytes of the sums of the largest size."""
        return self._bytes(self._sizes[-1], SUM)

    def rate(self, communicator: Any) -> float:
        """Return how many bytes of sums a second the devices exchange; raise an ExchangeError if NCCL gives one."""
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            communicator.exchange(NO_COPIES, self._collectives(self._sizes[-1], SUM), limit(self.bytes))
            communicator.wait()
            seconds.append(time.perf_counter() - began)
        return self.bytes / min(seconds)

    def _failures(self, size, op):
        for number, each in self._of(op):
            expected = (self._pattern[:size] * each.factor).astype(each.dtype)
            for place, (_, received) in enumerate(self._devices, self._first):
                if place in each.places and not np.array_equal(fetch(received[number])[:size], expected):
                    yield 'the device at place %d has got other numbers than were sent, in %s of %d of %s' % (
                        place, {SUM: 'a sum', BROADCAST: 'a broadcast'}.get(op, 'a message'), size, each.dtype)

    def _of(self, op):
        return [(number, each) for number, each in enumerate(self._each) if each.op == op]

    def _bytes(self, size, op):
        return size * sum(np.dtype(each.dtype).itemsize for _, each in self._of(op))

    def _collectives(self, size, op):
        """Return the collectives of an op on arrays of some elements."""
        def address(array, is_end):
            return array.gpudata if is_end or op != MESSAGE else 0  # only the two ends of a message have one
        places, chosen = range(self._first, self._first + len(self._devices)), self._of(op)
        send = [[address(sent[i], place == each.root) for i, each in chosen]
                for place, (sent, _) in zip(places, self._devices)]
        receive = [[address(received[i], place == each.target) for i, each in chosen]
                   for place, (_, received) in zip(places, self._devices)]
        columns = zip(*((DTYPES[each.dtype], op, each.root, each.target) for _, each in chosen))
        return Collectives(np.array(send, 'uint64'), np.array(receive, 'uint64'), np.full(len(chosen), size, 'uint64'),
                           *[np.array(column, 'int32') for column in columns])
