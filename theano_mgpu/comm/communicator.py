"""The communicator: the ranks that compute together, and the collectives by which they exchange values."""
from __future__ import annotations

import abc
import contextlib
from typing import Any, Callable, ContextManager, Sequence

import numpy as np

from .activities import FunctionNames

WIDTH = 32  # integers that a rank can give to a handshake: an array's shape, too


class DividedStates:
    """The states that are divided among ranks, so that each rank has the latest values of its share alone.

    A state stands here as the function that gathers it. All ranks add and remove the same states in the same order.
    """

    def __init__(self) -> None:
        self._gathers: dict[Callable[[], None], None] = {}  # a set in the order of insertion

    def add(self, gather: Callable[[], None]) -> None:
        """Note that a state is divided until all ranks call `gather`, a function that calls `remove`."""
        self._gathers[gather] = None

    def remove(self, gather: Callable[[], None]) -> None:
        """Note that every rank has the latest values again."""
        self._gathers.pop(gather, None)

    def consolidate(self) -> None:
        """Send the latest values of all states to every rank. Every rank has to make the call."""
        for gather in list(self._gathers):
            gather()


class Communicator(abc.ABC):
    """The ranks that compute together, from the view of one of them.

    Every rank makes the same calls in the same order. A handshake checks that they do. The other collectives check
    nothing: each comes after a handshake, with the same number of buffers on each rank. A buffer has the same shape and
    dtype on each rank unless its description says otherwise. Buffers are NumPy arrays here; a communicator between
    devices may have buffers on the devices. Functions over a communicator build on the collectives, see `collectives`,
    `failures`, `rank_0`, `compilation` and `half_precision`.

    `tests/support/communicator_cases.py` has the cases that any communicator passes.

    Parameters
    ----------
    rank, size : int
    hosts : list of str

    Attributes
    ----------
    rank, size : int
        Number of this rank, and of all.
    hosts : list of str
        Name of the host of each rank; empty where it is not known yet.
    n_handshakes : int
        Handshakes so far: equal on all ranks at the same place of a script.
    n_failures : int
        Errors so far that a rank has announced, and all ranks have raised.
    lost : str or None
        Why nothing can be exchanged any more, see `lose`.
    single_thread : context manager
        A block of one thread at a time, as often within another block as it likes. A handshake and the collectives
        after it belong into one block. Where there are several ranks, a second thread that enters a block gets an
        MgpuError.
    mailbox : Mailbox or None
        Messages from one rank to another, beside the collectives; None where there are none.
    functions : FunctionNames
        The functions over these ranks.
    divided : DividedStates
        The variables of which each rank has a part.
    """

    def __init__(self, rank: int, size: int, hosts: list[str]) -> None:
        self.rank, self.size, self.hosts = rank, size, hosts
        self.n_handshakes = self.n_failures = 0
        self.lost: str | None = None
        self.single_thread: ContextManager = contextlib.nullcontext()
        self.mailbox: Any = None
        self.functions, self.divided = FunctionNames(), DividedStates()

    @property
    def on_one_host(self) -> bool:
        """Return whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def name(self, rank: int) -> str:
        """Return a rank and its host, for messages."""
        return 'rank %d (host %s)' % (rank, self.hosts[rank]) if self.hosts[rank] else 'rank %d' % rank

    @abc.abstractmethod
    def handshake(self, activity: Sequence[int], integers: Sequence[int] = ()) -> np.ndarray:
        """Wait until every rank does the same, and return the integers of each one.

        Parameters
        ----------
        activity : sequence of int
            The activity of this rank, at most three numbers; see `activities.END`.
        integers : sequence of int
            At most `WIDTH`, each from -2**63 to 2**63 - 1; as many on each rank.

        Returns
        -------
        ndarray of int64, shape (size, len(integers))
            A row for each rank.

        Raises
        ------
        RankError
            If a rank does something else, or does not come in time.
        MgpuError
            If another thread is in a block of `single_thread`.
        Exception
            The error that a rank has announced instead, see `announce_failure`.
        """

    @abc.abstractmethod
    def announce_failure(self, error: BaseException, of_step: bool) -> BaseException:
        """Join the handshake of the others as a rank that has failed: their handshake raises this error.

        Several ranks may announce one at once. Callers use `failures.common_error`.

        Parameters
        ----------
        error : Exception or SystemExit
            The error of this rank.
        of_step : bool
            Whether all ranks compute this step, so that they can compute the batch otherwise.

        Returns
        -------
        BaseException
            The error of the first rank that has failed, of the same class and text on each rank. Where there are
            several ranks, its attribute `known_to_all` is true, and `of_step` is as on the first rank.

        Raises
        ------
        MgpuError
            As for `handshake`.
        """

    @abc.abstractmethod
    def check_threads(self) -> None:
        """Raise an MgpuError if `all_reduce` may not run in one thread while another one has a handshake."""

    @abc.abstractmethod
    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        """Add arrays over the ranks, in place. Each rank gets the same bits.

        Parameters
        ----------
        arrays : sequence of ndarray, shape (n,)
            One-dimensional and contiguous, of a floating, complex or integer dtype. float16 is added in float32.
        """

    @abc.abstractmethod
    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        """Add arrays over the ranks, each for the one rank that owns it.

        Parameters
        ----------
        arrays : sequence of ndarray
            Of any shape and a floating dtype; their values stay. float16 is added in float32.
        owners : sequence of int
            The rank that owns each array, the same on each rank.

        Returns
        -------
        list of (ndarray or None)
            The sums that this rank owns, or the array itself where there is nothing to add; None for the others.
        """

    @abc.abstractmethod
    def all_gather(self, rows: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> None:
        """Put the rows of all ranks together, in the order of the ranks.

        Parameters
        ----------
        rows : ndarray, shape (lengths[rank], ...)
            Of this rank; C-contiguous, of any dtype without objects.
        out : ndarray, shape (sum(lengths), ...)
            Where the rows of all ranks go; C-contiguous, of the same dtype.
        lengths : sequence of int
            Rows of each rank, the same on each rank; 0 is allowed.
        """

    @abc.abstractmethod
    def all_gather_owned(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        """Send arrays that one rank owns each to all other ranks.

        Parameters
        ----------
        arrays : sequence of ndarray
            Of any shape, and any dtype without objects. The arrays of this rank are sent; only the shapes and dtypes
            of the others matter.
        owners : sequence of int
            The rank that owns each array, the same on each rank.

        Returns
        -------
        list of (ndarray or None)
            New arrays with the values of other ranks; None for each array of this rank.
        """

    @abc.abstractmethod
    def all_to_all(self, messages: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Send a message to each rank, and return the message of each rank for this one.

        Parameters
        ----------
        messages : sequence of ndarray
            One for each rank, this one included; one-dimensional, all of one dtype without objects.
        lengths : sequence of int
            Elements of the message that each rank sends to this one.
        """

    @abc.abstractmethod
    def broadcast(self, arrays: Sequence[np.ndarray], root: int = 0) -> None:
        """Fill arrays with the values of the root, in place.

        Parameters
        ----------
        arrays : sequence of ndarray
            C-contiguous, of any shape, and any dtype without objects; on the root they may be read-only.
        root : int
        """

    def lose(self, reason: str) -> None:
        """Make every later handshake raise a RankError, since the progress of the other ranks is not known any more."""
        self.lost = reason
