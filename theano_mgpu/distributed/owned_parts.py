"""Arrays of which each rank of an MPI job owns a part: through memory that the ranks share, else by messages."""
import numpy as np

from ..replicas.collectives import all_reduce
from .meeting import SUMS


class OwnedParts:
    """The collectives that `Ranks.reduce_scatter` and `Ranks.all_gather_views` describe.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    one_host : bool
        Whether all ranks are on one host, so that they can share memory.
    """

    def __init__(self, mpi, one_host):
        self._mpi, self._comm, self._one_host = mpi, mpi.COMM_WORLD, one_host
        self._others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def shared(self, buffers):
        """The buffers of the other ranks, by rank; none where the ranks do not share memory."""
        if self._one_host:
            return buffers.of_others(self._comm)
        buffers.close()
        return {}

    def add(self, buffers, owners):
        """Replace the views that this rank owns by their sums over the ranks."""
        rank, size = self._comm.rank, self._comm.size
        shared = self.shared(buffers)
        for parts, *others in zip(*[each.parts(owners, size) for each in [buffers, *shared.values()]]):
            given = [other[rank] for other in others] if shared else self._given(parts)
            all_reduce(given, [1.0] * len(given), parts[rank], accumulate=True)
        self._end_reading(shared)

    def gather(self, buffers, owners):
        """Copies of the views that others own; None for each of this rank's."""
        shared = self.shared(buffers)
        if not shared:
            for flat, parts in zip(buffers.flat, buffers.parts(owners, self._comm.size)):
                lengths = [_integers_of(part).size for part in parts]
                self._comm.Allgatherv(self._mpi.IN_PLACE, [_integers_of(flat), lengths])
        found = [None if owner == self._comm.rank else np.array(shared.get(owner, buffers).views[i])
                 for i, owner in enumerate(owners)]
        self._end_reading(shared)
        return found

    def _given(self, parts):
        """Send each rank its part; returns what the others have sent. Open MPI's Reduce_scatter takes twice as long."""
        received = [np.empty_like(parts[self._comm.rank]) for _ in self._others]
        self._mpi.Request.Waitall(
            [self._comm.Irecv(_integers_of(part), other, SUMS) for other, part in zip(self._others, received)] +
            [self._comm.Isend(_integers_of(parts[other]), other, SUMS) for other in self._others])
        return received

    def _end_reading(self, shared):
        """Until then nobody may write to what another rank may still read."""
        if shared:
            self._comm.Barrier()


def _integers_of(array):
    """The memory of a one-dimensional array as integers: MPI has no float16."""
    return array.view('int%d' % (8 * min(array.itemsize, 8)))
