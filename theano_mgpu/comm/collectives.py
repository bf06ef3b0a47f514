"""Collectives that begin with a handshake, over any communicator: of integers, rows, arrays and objects.

Every rank has to make the same call. A rank that does something else, or has failed, is an error on every rank, see
`Communicator.handshake`.
"""
from __future__ import annotations

import pickle
from typing import Any, Sequence

import numpy as np

from ..errors import BatchError
from .activities import ADD, GATHER, SHARE
from .communicator import WIDTH, Communicator


def all_gather_int(ranks: Communicator, number: int) -> list[int]:
    """Return an integer, or a bool as one, of each rank."""
    return ranks.handshake((SHARE,), [number])[:, 0].tolist()


def all_gather_rows(ranks: Communicator, rows: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return the rows of all ranks, in the order of the ranks.

    Parameters
    ----------
    ranks : Communicator
    rows : ndarray, shape (n, ...)
        The rows of this rank, of any dtype without objects, the same on each rank.
    lengths : sequence of int
        Count of the first rows that each rank gives, the same on each rank. For 0, shapes of rows may differ.

    Returns
    -------
    ndarray, shape (sum(lengths), ...)

    Raises
    ------
    BatchError
        If the ranks have rows of different shapes.
    """
    if ranks.size == 1:
        return rows
    own = np.ascontiguousarray(rows[:lengths[ranks.rank]])
    whole = np.empty((sum(lengths),) + rows.shape[1:], rows.dtype)  # before the others rely on this rank
    shape = [rows.ndim - 1, *rows.shape[1:]] + [0] * (WIDTH - rows.ndim)
    with ranks.single_thread:
        of_ranks = ranks.handshake((GATHER,), shape)
        shapes = {tuple(row[1:1 + row[0]].tolist()) for row, length in zip(of_ranks, lengths) if length}
        if len(shapes) > 1:
            raise BatchError('the rows that the ranks have of one output have different shapes, %s, and cannot be '
                             'put together: reduce this output, or pad its rows to one shape'
                             % ' and '.join(map(str, sorted(shapes))))
        if shapes and shapes != {rows.shape[1:]}:  # the shape means nothing on a rank without samples
            whole = np.empty((sum(lengths),) + shapes.pop(), rows.dtype)
        ranks.all_gather(own, whole, lengths)
    return whole


def all_gather_object(ranks: Communicator, value: Any) -> list[Any]:
    """Return a picklable value of each rank, on each rank."""
    if ranks.size == 1:
        return [value]
    pickled = np.frombuffer(pickle.dumps(value, 5), 'uint8')
    with ranks.single_thread:
        lengths = ranks.handshake((SHARE,), [len(pickled)])[:, 0].tolist()
        every = np.empty(sum(lengths), 'uint8')
        ranks.all_gather(pickled, every, lengths)
    return [value if rank == ranks.rank else pickle.loads(part.data) for rank, part in enumerate(split(every, lengths))]


def broadcast_object(ranks: Communicator, value: Any = None, root: int = 0, activity: int = SHARE) -> Any:
    """Return the picklable value of the root, on each rank.

    Parameters
    ----------
    ranks : Communicator
    value : object
        The value of the root. The arrays in it are sent from their memory.
    root : int
    activity : int
        The activity of the handshake, see `activities.END`.
    """
    if ranks.size == 1:
        return value
    parts = _as_bytes(value) if ranks.rank == root else []
    with ranks.single_thread:
        length = ranks.handshake((activity,), [parts[0].size if parts else 0])[root, 0]
        header = parts[0] if parts else np.empty(length, 'uint8')
        ranks.broadcast([header], root)
        if not parts:
            parts = [header] + _buffers_for(header)
        ranks.broadcast(parts[1:], root)
    return value if ranks.rank == root else _from_bytes(parts)


def all_reduce_small(ranks: Communicator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the sums over the ranks of small arrays, exchanged in one piece for each dtype.

    Parameters
    ----------
    ranks : Communicator
    arrays : sequence of ndarray
        Of any shape, and dtypes as for `Communicator.all_reduce`; the same ones on each rank.
    """
    if ranks.size == 1 or not arrays:
        return list(arrays)
    of_dtype: dict[np.dtype, list[int]] = {}
    for i, array in enumerate(arrays):
        of_dtype.setdefault(np.dtype(array.dtype), []).append(i)
    pieces = [np.concatenate([np.ravel(arrays[i]) for i in indices]) for indices in of_dtype.values()]
    ranks.handshake((ADD,))
    ranks.all_reduce(pieces)
    sums = list(arrays)
    for indices, piece in zip(of_dtype.values(), pieces):
        for i, part in zip(indices, split(piece, [np.size(arrays[i]) for i in indices])):
            sums[i] = part.reshape(np.shape(arrays[i]))
    return sums


def split(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive pieces of an array, of these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1])


def _as_bytes(value):
    """Return a value as arrays of bytes: a header, then the memory of each array in the value, uncopied."""
    buffers = []
    pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
    memory = [np.asarray(buffer.raw()) for buffer in buffers]
    return [np.frombuffer(pickle.dumps((pickled, [part.size for part in memory]), 5), 'uint8')] + memory


def _buffers_for(header):
    """Return empty arrays for the memory that follows a header of `_as_bytes`."""
    return [np.empty(size, 'uint8') for size in pickle.loads(header.data)[1]]


def _from_bytes(parts):
    """Return the value that `_as_bytes` has divided into these parts; its arrays use their memory."""
    return pickle.loads(pickle.loads(parts[0].data)[0], buffers=parts[1:])
