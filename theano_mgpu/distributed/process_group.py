"""The processes of a job, as seen from one of them. Here: one process that is alone; `mpi` has those of an MPI job."""
import contextlib
from typing import Any, Callable, List, Optional, Sequence

import numpy as np

from .failures import packed, unpacked

WIDTH = 32  # integers that a rank can give when the ranks meet: an array's shape, too

# What a rank may be doing, the first number of `what`; a function's number follows, and how many calls went before.
END, BUILD, COMPILE, SHARE, CALL, ADD, GATHER, AGREE, FAILED, READ, COMPARE, FEED = range(12)

_ALONE = contextlib.nullcontext()


class Ranks:
    """One process alone: each collective is over it, and costs nothing.

    Attributes
    ----------
    rank, size : int
        Number of this process, and of all.
    on_one_host : bool
    """

    rank, size, on_one_host = 0, 1, True

    def one_thread(self):
        """A context manager for a ``with`` block in which no other thread may use the ranks: an MgpuError there."""
        return _ALONE

    def meet(self, what: Sequence[int], values: Sequence[int] = ()) -> np.ndarray:
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
            If a rank does something else, or does not come in time.
        Exception
            The error of a rank that has failed, see `common_error`.
        """
        return np.array([values], 'int64')

    def agree(self) -> None:
        """Wait until every rank has come to the end of a step; the error of one that has failed in it."""

    def common_error(self, error: BaseException, of_step: bool = False) -> BaseException:
        """Have every rank raise one error, since this rank has met one: the others raise it when they next meet.

        Parameters
        ----------
        error : BaseException
        of_step : bool
            Whether it is that of a step which all ranks compute, so that they can compute the batch otherwise.

        Returns
        -------
        BaseException
            The exception to raise: that of the first rank which has failed, of the same class and text on each rank.
            An error that all ranks know already, and an interruption such as Ctrl-C, is returned as it is.
        """
        return error

    def raise_common(self, error: BaseException, of_step: bool = False) -> None:
        """Raise the `common_error` of all ranks; `error` is the exception that is being handled."""
        common = self.common_error(error, of_step)
        if common is error:
            raise
        raise common from error

    @contextlib.contextmanager
    def failing_together(self):
        """Have every rank raise the error of a ``with`` block, see `common_error`; all ranks enter the block.

        Ctrl-C is one of this rank alone: between two steps, it leaves the ranks where they are.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            self.raise_common(error)

    def check_threads(self) -> None:
        """Raise an MgpuError if a thread may not exchange while the ranks meet in another one."""

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        """Add one-dimensional arrays over the ranks, in place; bitwise the same on each. The ranks have just met."""

    def all_reduce_in_half(self, arrays: Sequence[np.ndarray]) -> None:
        """As `all_reduce`, for arrays of any shape, but exchanged as float16: see `half_precision.add_in_half`."""

    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> List[Optional[np.ndarray]]:
        """Add arrays over the ranks, each for the one rank that owns it. The ranks have just met.

        Parameters
        ----------
        arrays : list of ndarray
            They keep what they have.
        owners : list of int
            The rank that owns each array.

        Returns
        -------
        list of (ndarray or None)
            New arrays; None for each that another rank owns.
        """
        return list(arrays)

    def all_gather_owned(self, arrays: Sequence[Any], owners: Sequence[int]) -> List[Optional[np.ndarray]]:
        """The values of the arrays that other ranks own.

        Parameters
        ----------
        arrays : list of ndarray
            Those of this rank are sent. Of the others shape and dtype alone matter.
        owners : list of int
            The rank that owns each array.

        Returns
        -------
        list of (ndarray or None)
            New arrays; None for each of this rank.
        """
        return [None] * len(owners)

    def all_gather(self, rows: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Rows of all ranks, in their order.

        Parameters
        ----------
        rows : ndarray
            Of this rank.
        lengths : list of int
            Of each rank.
        """
        return rows

    def broadcast(self, values: List[Any]) -> List[Any]:
        """Arrays (or other picklable values) as rank 0 has them.

        Parameters
        ----------
        values : list of ndarray or object
            On rank 0; on other ranks as many, of the same shapes, are replaced.
        """
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """One picklable value of the root rank's, whatever the others have."""
        return value

    def broadcast_arrays(self, value: Any = None) -> Any:
        """As `broadcast_object`, from rank 0, for values that are mostly arrays: these are sent from their memory."""
        return value

    def gather_object(self, value: Any) -> Any:
        """A picklable value of each rank, on rank 0; None on the others."""
        return [value]

    def by_first(self, act):
        """Have rank 0 act alone; the other ranks wait for it, and every rank has to make the call.

        Parameters
        ----------
        act : callable
            Without arguments; it must not exchange anything with other ranks.

        Returns
        -------
        object
            What ``act()`` returned on rank 0, which must be picklable.

        Raises
        ------
        Exception
            What ``act()`` raised, on every rank.
        """
        self.whole()
        result = error = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as failure:  # raised below, once the other ranks know
                error = failure
        if self.size > 1:
            result, package = self.broadcast_object((result, error and packed(error)))
            error = error or package and unpacked(package, 'rank 0 failed')
        if error is not None:
            error.known_to_all, error.of_step = True, False
            raise error
        return result

    def sent_by_first(self, act):
        """As `by_first`, but rank 0 does not wait for the others."""
        return act()

    def write_by_first(self, path, write):
        """Have rank 0 write a file; another rank that makes the same call goes on once the file is written.

        Rank 0 does not wait, so that a script may call it on rank 0 alone. A rank whose file rank 0 does not write
        at the same place of the script writes it itself.

        Parameters
        ----------
        path : str
            Absolute.
        write : callable
            Without arguments.

        Raises
        ------
        Exception
            What ``write()`` raised; as for `by_first` on the other ranks.
        RankError
            If rank 0 neither writes the file nor goes on.
        """
        write()

    def note_divided(self, gather: Callable) -> None:
        """Each rank has the latest values of some variables alone, until all call `gather`."""

    def note_whole(self, gather: Callable) -> None:
        """`gather` was called."""

    def whole(self) -> None:
        """Give every rank the latest values of all variables. Every rank has to make the call."""

    def everyones(self, number: int) -> List[int]:
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
