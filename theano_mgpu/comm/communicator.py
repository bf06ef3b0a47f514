"""The communicator: the ranks that compute together, and the collectives by which they exchange values."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Sequence

import numpy as np

from .notice import notices

WIDTH = 32  # integers that a rank can give to a handshake: an array's shape, too


class Communicator:
    """The ranks that compute together, from the view of one of them; here one alone, whose collectives do nothing.

    Every rank makes the same calls in the same order. A handshake checks that they do. The other collectives check
    nothing: each comes after a handshake, with the same number of buffers on each rank. A buffer has the same shape and
    dtype on each rank unless its description says otherwise. Buffers are NumPy arrays here; a communicator between
    devices may have buffers on the devices. Functions over a communicator build on the collectives, see `collectives`,
    `failures`, `rank_0` and `compilation`.

    `tests/support/communicator_cases.py` has the cases that any communicator passes.

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
    n_changes : int
        Changes of shared variables that ranks have made `alone`, up to the last handshake.
    lost : str or None
        Why nothing can be exchanged any more, since the progress of the other ranks is not known: if it is set, every
        later handshake raises a RankError.
    takes_threads : bool
        Whether `all_reduce` may run in one thread while another one has a handshake.
    single_thread : context manager
        A block of one thread at a time, as often within another block as it likes. A handshake and the collectives
        after it belong into one block. Where there are several ranks, a second thread that enters a block gets an
        MgpuError.
    mailbox : Mailbox or None
        Messages from one rank to another, beside the collectives; None where there are none.
    functions : list of str
        Names of the functions over these ranks in the order of their making, which is the same on all ranks.
    divided : dict
        The states of which each rank has the latest values of its share alone, in the order in which they were divided,
        which is the same on all ranks: functions that gather such a state, and take it out. The values mean nothing.
    """

    def __init__(self, rank: int = 0, size: int = 1, hosts: Sequence[str] = ('',)) -> None:
        self.rank, self.size, self.hosts = rank, size, list(hosts)
        self.n_handshakes = self.n_failures = self.n_changes = self._notice = 0
        self.lost: str | None = None
        self.takes_threads = True
        self.single_thread: ContextManager = contextlib.nullcontext()
        self.mailbox: Any = None
        self.functions: list[str] = []
        self.divided: dict[Callable[[], None], None] = {}

    @property
    def notice(self) -> int:
        """The signal to end that a rank has got, as of the last handshake: the same on all; 0 if there is none."""
        return self._notice if self.size > 1 else notices.received

    @property
    def on_one_host(self) -> bool:
        """True if all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def name(self, rank: int) -> str:
        """Return a rank and its host, for messages."""
        return 'rank %d (host %s)' % (rank, self.hosts[rank]) if self.hosts[rank] else 'rank %d' % rank

    def add_function(self, name: str | None) -> int:
        """Return the number of a new function."""
        self.functions.append(name or 'a function')
        return len(self.functions) - 1

    def consolidate(self) -> None:
        """Send the latest values of all sharded states to every rank. Every rank has to make the call."""
        for gather in list(self.divided):
            gather()

    def handshake(self, activity: Sequence[int], integers: Sequence[int] = ()) -> np.ndarray:
        """Wait until every rank does the same, and return the integers of each one: int64, a row for each rank.

        An activity has at most three numbers, see `activities.END`. The integers are at most `WIDTH`, as many on each
        rank.

        Raises
        ------
        RankError
            If a rank does something else, or does not come in time.
        MgpuError
            If another thread is in a block of `single_thread`.
        Exception
            The error that a rank has announced instead, see `announce_failure`.
        """
        return np.array([integers], 'int64')

    def announce_failure(self, error: BaseException, of_step: bool) -> BaseException:
        """Join the handshake of the others as a rank that has failed; return the error that all of them raise.

        Several ranks may announce one at once. It is the error of the first of them, of the same class and text on each
        rank. Where there are several ranks, its attribute `known_to_all` is true, and `of_step` is as on the first
        rank: whether all ranks compute this step, so that they can compute the batch otherwise. Callers use
        `failures.common_error`. Raises an MgpuError as `handshake` does.
        """
        return error

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        """Add arrays over the ranks, in place. Each rank gets the same bits.

        They are one-dimensional and contiguous, of a floating, complex or integer dtype. float16 is added in float32.
        """

    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        """Add arrays over the ranks, each for the one rank that owns it; float16 is added in float32.

        Return the sums that this rank owns, or the array itself where there is nothing to add; None for the others.
        The arrays, of any shape and a floating dtype, keep their values.
        """
        return list(arrays)

    def all_gather(self, rows: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> None:
        """Put the rows of all ranks together in `out`, in the order of the ranks.

        Rank i gives ``lengths[i]`` rows, which may be 0. Both arrays are C-contiguous, of a dtype without objects.
        """
        out[...] = rows

    def all_gather_owned(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        """Send arrays that one rank owns each to all other ranks.

        Return new arrays with the values of other ranks; None for each array of this rank. Of the arrays of others only
        the shapes and dtypes matter.
        """
        return [None] * len(arrays)

    def all_to_all(self, messages: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Send a message to each rank, and return the message of each rank for this one, of these lengths.

        Messages are one-dimensional and contiguous, all of one dtype without objects. The one to this rank itself is
        returned as it is.
        """
        return list(messages)

    def broadcast(self, arrays: Sequence[np.ndarray], root: int = 0) -> None:
        """Fill arrays with the values of the root, in place.

        They are C-contiguous, of any shape, and any dtype without objects; on the root they may be read-only.
        """
