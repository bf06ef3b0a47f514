"""Arrays that the processes of one host share: what one has written, the others read without a message."""
import mmap
import os

import numpy as np

from ..replicas.transfers import FlatBuffers

NAME = 'theano_mgpu'
MARK = 64  # bytes before an array, of which the first ones tell this memory from any other


class SharedBuffers(FlatBuffers):
    """Flat buffers on the host whose memory other processes of this host can use, too.

    Parameters
    ----------
    like : list of (shape, dtype)

    Notes
    -----
    The memory is an anonymous file (``memfd_create``), which other processes of the same user open by its number in
    ``/proc``. It has no name to be left behind by a process that is killed, and no limit as that of ``/dev/shm``, which
    containers keep small.
    """

    def __init__(self, like):
        self._handles, self._files = [], []
        self._others = None
        super().__init__(like)

    def of_others(self, comm):
        """These buffers as the other processes of a communicator have them. The first call is a collective one.

        Parameters
        ----------
        comm : mpi4py.MPI.Comm

        Returns
        -------
        dict of int to FlatBuffers
            By rank. Empty where the processes cannot share memory, such as those of several hosts.
        """
        if self._others is None:
            every = comm.allgather((self.like, self._handles))
            try:
                found = {rank: _Opened(*each) for rank, each in enumerate(every) if rank != comm.rank}
            except OSError:
                found = {}
            self._others = found if all(comm.allgather(bool(found))) else {}
            self.close()
        return self._others

    def close(self):
        """Let no more processes open the memory, which stays as long as it is used."""
        while self._files:
            os.close(self._files.pop())

    def _zeros(self, size, dtype, context):
        try:
            file = os.memfd_create(NAME)
        except (AttributeError, OSError):  # an old C library or kernel, or a container that forbids it
            self._handles.append(None)
            return super()._zeros(size, dtype, context)
        self._files.append(file)
        os.ftruncate(file, MARK + size * np.dtype(dtype).itemsize)
        memory = mmap.mmap(file, 0)
        mark = os.urandom(16)
        memory[:len(mark)] = mark
        self._handles.append(('/proc/%d/fd/%d' % (os.getpid(), file), mark))
        return np.frombuffer(memory, dtype, size, MARK)

    def __del__(self):
        self.close()


class _Opened(FlatBuffers):
    """The SharedBuffers of another process; an OSError if this process cannot use them."""

    def __init__(self, like, handles):
        self._handles = iter(handles)
        super().__init__(like)

    def _zeros(self, size, dtype, context):
        handle = next(self._handles)
        if handle is None:
            raise OSError('this memory is not shared')
        path, mark = handle
        if not os.readlink(path).startswith('/memfd:' + NAME):
            raise OSError('%s is not shared memory' % path)
        file = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        if memory[:len(mark)] != mark:  # of a process that has the same number in another container
            raise OSError('%s is the memory of another process' % path)
        return np.frombuffer(memory, dtype, size, MARK)
