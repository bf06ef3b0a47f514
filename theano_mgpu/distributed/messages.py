"""Values as the bytes that MPI sends."""
import pickle

import numpy as np

LONGEST = 1 << 30        # bytes in one message: MPI counts up to 2**31


def as_bytes(value, most):
    """Return a value as arrays of bytes, at most `most`: a pickle, then the memory of the arrays in the value."""
    buffers = []
    pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
    if len(buffers) >= most or not all(len(buffer.raw()) for buffer in buffers):
        return [np.frombuffer(pickle.dumps(value, 5), 'uint8')]
    return [np.frombuffer(part, 'uint8') for part in [pickled] + [buffer.raw() for buffer in buffers]]


def from_bytes(parts):
    """Return the value of which `as_bytes` has made these parts; its arrays use their memory."""
    return pickle.loads(parts[0], buffers=parts[1:])


def bytes_of(array):
    """Return the bytes of a contiguous array, as a one-dimensional view."""
    return array.reshape(-1).view('uint8') if array.size else np.empty(0, 'uint8')


def summable(array):
    """Return the array, or a copy of a dtype that MPI can add: it has no float16."""
    return array.astype('float32') if array.dtype == 'float16' else array


def split(array, lengths):
    """Return consecutive pieces of an array, of these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1])
