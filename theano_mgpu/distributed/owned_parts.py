"""Arrays of which each rank of an MPI job owns some: their sums over the ranks go to it, or its values to all ranks."""
import numpy as np

from ..replicas.collectives import all_reduce
from .meeting import PARTS


class OwnedParts:
    """The collectives that `Ranks.reduce_scatter` and `Ranks.all_gather_owned` describe.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.

    Notes
    -----
    Each array is a message of its own, from the memory that it is in to new memory of another rank. On one host MPI
    copies it once where the system lets a process read another one's memory. Open MPI's collectives for parts of
    different lengths take twice as long, and need all arrays in one piece of memory before.
    """

    def __init__(self, mpi):
        self._mpi, self._comm = mpi, mpi.COMM_WORLD
        self._others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def add(self, arrays, owners):
        """New arrays with the sums of those that this rank owns; None for each of the others."""
        requests, received = [], {}
        for i, (array, owner) in enumerate(zip(arrays, owners)):
            if owner == self._comm.rank:
                received[i] = [np.empty(array.shape, array.dtype) for _ in self._others]
                requests += [self._receive(*each) for each in zip(received[i], self._others)]
            else:
                requests.append(self._send(array, owner))
        self._mpi.Request.Waitall(requests)
        return [self._sum(array, received[i]) if i in received else None for i, array in enumerate(arrays)]

    def _sum(self, own, received):
        parts = [own] + received[1:]
        return all_reduce(parts, received[0], accumulate=True)

    def gather(self, arrays, owners):
        """New arrays with the values of those that others own; None for each of this rank's."""
        requests, found = [], []
        for array, owner in zip(arrays, owners):
            if owner == self._comm.rank:
                found.append(None)
                requests += [self._send(array, other) for other in self._others]
            else:
                found.append(np.empty(array.shape, array.dtype))
                requests.append(self._receive(found[-1], owner))
        self._mpi.Request.Waitall(requests)
        return found

    def _send(self, array, rank):
        return self._comm.Isend(_integers_of(np.ascontiguousarray(array)), rank, PARTS)

    def _receive(self, array, rank):
        return self._comm.Irecv(_integers_of(array), rank, PARTS)


def _integers_of(array):
    """The memory of a contiguous array as integers: MPI has no float16, and counts no more than 2**31 bytes."""
    return array.reshape(-1).view('int%d' % (8 * min(array.itemsize, 8)))
