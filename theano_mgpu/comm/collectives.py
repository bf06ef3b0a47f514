"""Collectives that begin with a handshake, over any communicator: of integers, rows, arrays and objects.

Every rank has to make the same call. A rank that does something else, or has failed, is an error on every rank, see
`Communicator.handshake`.
"""
from __future__ import annotations

import pickle
from typing import Any, Sequence

import numpy as np

from ..errors import BatchError
from .activities import GATHER, SHARE
from .communicator import WIDTH, Communicator


def all_gather_int(ranks: Communicator, number: int) -> list[int]:
    """Return an integer, or a bool as one, of each rank."""
    return ranks.handshake((SHARE,), [number])[:, 0].tolist()


def all_gather_rows(ranks: Communicator, rows: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return the first rows of all ranks, so many of each, in the order of the ranks.

    Raises a BatchError if the ranks have rows of different shapes; a rank that gives none does not count. The dtype,
    without objects, is the same on each rank.
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


def all_gather_object(ranks: Communicator, value: Any, activity: Sequence[int] = (SHARE,)) -> list[Any]:
    """Return a picklable value of each rank, on each rank. The `activity` is the one of the handshake."""
    if ranks.size == 1:
        return [value]
    pickled = np.frombuffer(pickle.dumps(value, 5), 'uint8')
    with ranks.single_thread:
        lengths = ranks.handshake(activity, [len(pickled)])[:, 0].tolist()
        every = np.empty(sum(lengths), 'uint8')
        ranks.all_gather(pickled, every, lengths)
    parts = np.split(every, np.cumsum(lengths)[:-1])
    return [value if rank == ranks.rank else pickle.loads(part.data) for rank, part in enumerate(parts)]


def broadcast_object(ranks: Communicator, value: Any = None, root: int = 0, activity: int = SHARE) -> Any:
    """Return the picklable value of the root, on each rank. The arrays in it are sent from their memory.

    The `activity` is the one of the handshake, see `activities.END`.
    """
    if ranks.size == 1:
        return value
    header: Any = np.empty(0, 'uint8')
    memory = []
    if ranks.rank == root:
        buffers: list[Any] = []
        pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
        memory = [np.asarray(buffer.raw()) for buffer in buffers]
        header = np.frombuffer(pickle.dumps((pickled, [part.size for part in memory]), 5), 'uint8')
    with ranks.single_thread:
        length = ranks.handshake((activity,), [header.size])[root, 0]
        if ranks.rank != root:
            header = np.empty(length, 'uint8')
        ranks.broadcast([header], root)
        pickled, sizes = pickle.loads(header.data)
        if ranks.rank != root:
            memory = [np.empty(size, 'uint8') for size in sizes]
        ranks.broadcast(memory, root)
    return value if ranks.rank == root else pickle.loads(pickled, buffers=memory)
