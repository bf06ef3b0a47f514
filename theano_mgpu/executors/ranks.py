"""The processes of a job, as seen from one of them. Here: one process that is alone; `mpi` has those of an MPI job."""
import contextlib

import numpy as np

WIDTH = 32  # integers that a rank can give when the ranks meet: an array's shape, too

# What a rank may be doing, the first number of `what`; a function's number follows, and how many calls went before.
END, BUILD, COMPILE, SHARE, CALL, ADD, GATHER, AGREE, FAILED = range(9)

_ALONE = contextlib.nullcontext()


class Ranks:
    """One process alone: each collective is over it, and costs nothing.

    Attributes
    ----------
    rank, size : int
        Number of this process, and of all.
    """

    rank, size = 0, 1

    def one_thread(self):
        """A context manager for a ``with`` block in which no other thread may use the ranks: an MgpuError there."""
        return _ALONE

    def meet(self, what, values=()):
        """Wait until every rank does the same, and learn each one's integers.

        Parameters
        ----------
        what : tuple of int
            What is being done, at most three numbers; see `END`.
        values : list of int
            At most `WIDTH`.

        Returns
        -------
        ndarray of int64, shape (size, len(values))

        Raises
        ------
        RankError
            If a rank does something else, has failed (`give_up`), or does not come in time.
        """
        return np.array([values], 'int64')

    def agree(self):
        """Wait until every rank has come to the end of a step; a RankError if one has failed in it."""

    def give_up(self, error):
        """Have the others fail, too, since this rank has met an error in a step: they learn of it when they next meet.

        Parameters
        ----------
        error : BaseException
            Of a RankError they know: each is raised on all ranks.
        """

    def add(self, arrays):
        """Add one-dimensional arrays over the ranks, in place; bitwise the same on each. The ranks have just met."""

    def gather(self, rows, lengths):
        """Rows of all ranks, in their order.

        Parameters
        ----------
        rows : ndarray
            Of this rank.
        lengths : list of int
            Of each rank.
        """
        return rows

    def broadcast(self, values):
        """Arrays (or other picklable values) as rank 0 has them.

        Parameters
        ----------
        values : list of ndarray or object
            On rank 0; on other ranks as many, of the same shapes, are replaced.
        """
        return values

    def tell(self, value, root=0):
        """One picklable value of the root rank's, whatever the others have."""
        return value

    def collect(self, value):
        """A picklable value of each rank, on rank 0; None on the others."""
        return [value]

    def everyones(self, number):
        """An integer of each rank."""
        return self.meet((SHARE,), [number])[:, 0].tolist()

    @contextlib.contextmanager
    def first_compiler(self):
        """One rank a host goes first through the block; the others then find what it has compiled.

        An error in it is one of all ranks.
        """
        yield

    def function_number(self, name):
        """A number for a new function, the same on all ranks."""
        return 0
