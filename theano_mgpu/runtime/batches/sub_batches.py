"""The length of a batch, and the outputs of several batches put together."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from ...errors import BatchError, LengthError


def batch_length(lengths: Sequence[int], names: Sequence[str], least: int = 1) -> int:
    """Return the length of all arguments that are split; raise a LengthError if they differ, or have too few."""
    if len(set(lengths)) > 1:
        odd = names[next(i for i, length in enumerate(lengths) if length != max(lengths))]
        each = ', '.join('%s has %d' % pair for pair in zip(names, lengths))
        raise LengthError('inputs of different lengths cannot be split into sub-batches: %s samples. If '
                          'one is not made of samples, every replica can get it whole: pass '
                          'broadcast=[%s] to mgpu.function or mgpu.training_function' % (each, odd))
    if lengths[0] < least:
        raise LengthError('the batch is empty: %s 0 samples; give at least one'
                          % ', '.join('%s has' % name for name in names))
    return lengths[0]


class JoinedOutputs:
    """Outputs of consecutive batches, put together along axis 0.

    Where the length of all is known, each array is made once.

    >>> rows = JoinedOutputs(3)
    >>> rows.add([np.array([1, 2])]), rows.add([np.array([3])])
    (2, 1)
    >>> rows.arrays()
    [array([1, 2, 3])]
    """

    def __init__(self, length: int | None = None) -> None:
        self._length = length
        self._rows = 0
        self._parts: list[list[np.ndarray]] = []  # a list of batches an output
        self._whole: list[np.ndarray] = []        # an array an output

    def add(self, outputs: Sequence[np.ndarray]) -> int:
        """Add a batch's outputs; return the number of rows. Raise a BatchError if they do not have one a sample."""
        numbers = [output.shape[0] if output.ndim else None for output in outputs]
        stop = self._rows + (numbers[0] or 0)
        if None in numbers or len(set(numbers)) > 1 or (self._length is not None and stop > self._length):
            raise BatchError('outputs of shapes %s cannot be put together: each needs one row a sample. Take them '
                             'batch by batch, from map(batches)' % ', '.join(str(output.shape) for output in outputs))
        if self._length is None:
            self._parts = self._parts or [[] for _ in outputs]
            for parts, output in zip(self._parts, outputs):
                parts.append(output)
        else:
            self._whole = self._whole or [np.empty((self._length,) + output.shape[1:], output.dtype)
                                          for output in outputs]
            for whole, output in zip(self._whole, outputs):
                whole[self._rows:stop] = output
        before, self._rows = self._rows, stop
        return stop - before

    def __len__(self) -> int:
        return self._rows

    def arrays(self) -> list[np.ndarray]:
        """Return the arrays, one an output; raise a BatchError if rows are missing."""
        if self._length is None:
            return [np.concatenate(parts) for parts in self._parts]
        if self._rows < self._length:
            raise BatchError('the outputs have %d rows for %d samples: they cannot be put together. Take them batch by '
                             'batch, from map(batches)' % (self._rows, self._length))
        return self._whole
