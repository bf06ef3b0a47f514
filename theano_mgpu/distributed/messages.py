"""Values as the bytes that ranks send."""
from __future__ import annotations

import pickle
from typing import Any, Sequence

import numpy as np

LONGEST = 1 << 30        # bytes in one message: MPI counts up to 2**31


def as_bytes(value: Any) -> list[np.ndarray]:
    """Return a value as arrays of bytes: a header, then the memory of each array in the value, uncopied."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
    memory = [np.asarray(buffer.raw()) for buffer in buffers]
    return [np.frombuffer(pickle.dumps((pickled, [part.size for part in memory]), 5), 'uint8')] + memory


def buffers_for(header: np.ndarray) -> list[np.ndarray]:
    """Return empty arrays for the memory that follows a header of `as_bytes`."""
    return [np.empty(size, 'uint8') for size in pickle.loads(header.data)[1]]


def from_bytes(parts: Sequence[np.ndarray]) -> Any:
    """Return the value that `as_bytes` has divided into these parts; its arrays use their memory."""
    return pickle.loads(pickle.loads(parts[0].data)[0], buffers=parts[1:])


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, as a one-dimensional view."""
    return array.reshape(-1).view('uint8') if array.size else np.empty(0, 'uint8')


def integers_of(array: np.ndarray) -> np.ndarray:
    """Return the memory of a contiguous array as integers: MPI has no float16, and counts no more than 2**31 bytes."""
    return array.reshape(-1).view('int%d' % (8 * min(array.itemsize, 8)))


def summable(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy of a dtype that MPI can add: it has no float16."""
    return array.astype('float32') if array.dtype == 'float16' else array


def split(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive pieces of an array, of these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1])
