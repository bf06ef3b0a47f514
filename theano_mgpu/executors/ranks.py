"""The processes of a job, as seen from one of them. Here: one process that is alone; `mpi` has those of an MPI job."""
import contextlib

import numpy as np

WIDTH = 8  # integers that a rank can give when the ranks meet

# What a rank may be doing, the first number of `what`; a function's number follows, and how many calls went before.
END, BUILD, CALL, AGREE, SHARE = range(5)


class Ranks:
    """One process alone: each collective is over it, and costs nothing.

    Attributes
    ----------
    rank, size : int
        Number of this process, and of all.
    """

    rank, size = 0, 1

    def meet(self, what, values=(), patience=None):
        """Wait until every rank does the same, and learn each one's integers.

        Parameters
        ----------
        what : tuple of int
            What is being done, at most three numbers; see `END`.
        values : list of int
            At most `WIDTH`.
        patience : float, optional
            Seconds after which a missing rank is an error; without it, only told of.

        Returns
        -------
        ndarray of int64, shape (size, len(values))

        Raises
        ------
        RankError
            If a rank does something else, or does not come.
        """
        return np.array([values], 'int64')

    def agree(self, error=None):
        """Raise, on every rank, if one has an error: here, this rank's."""
        if error is not None:
            raise error

    def add(self, arrays):
        """Add one-dimensional arrays over the ranks, in place; bitwise the same on each."""

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
        """One rank a host goes first through the block; the others then find what it has compiled."""
        yield

    def function_number(self, name):
        """A number for a new function, the same on all ranks."""
        return 0
