"""The slices that a batch is computed in: more of them where a device has too little memory."""
from __future__ import annotations

from typing import Sequence

from ..comm.communicator import Communicator
from ..comm.failures import common_error, raise_error
from ..devices.context_map import describe
from ..errors import ReplicaError, noted
from ..utils import rank_process
from .batch import Splitter


class Slices:
    """The growing number of slices of the batches of one function.

    Parameters
    ----------
    name : str or None
        The function's.
    splitter : Splitter
        It gets the numbers.
    can_be_divided : bool
        Whether a graph that is one part, for one replica, can be built again as one that is computed in slices.
    ranks : Communicator
    """

    def __init__(self, name: str | None, splitter: Splitter, can_be_divided: bool, ranks: Communicator) -> None:
        self._name, self._splitter, self._ranks = name or 'a function', splitter, ranks
        self._can_be_divided = can_be_divided
        self._full: dict[tuple[int, ...], str] = {}  # contexts with too little memory, of steps that are repeated

    def add(self, lengths: Sequence[int], error: BaseException) -> bool:
        """Have batches of some lengths computed in twice as many slices, because of an error of the step.

        Every rank calls it for the same step: the error of one is announced to all. Return whether the function has to
        be built again before, so that its graph is divided.

        Parameters
        ----------
        lengths : list of int
            Samples that each rank was given: of its own, or the whole batch.
        error : BaseException
            The exception that is being handled.

        Raises
        ------
        BaseException
            The error of all ranks, if it is not for lack of memory, or no further slices are possible.
        """
        common, key, shares = common_error(self._ranks, error, of_step=True), tuple(lengths), self._splitter.shares
        now = self._splitter.slices.get(key, shares.micro_batches)
        if isinstance(common, ReplicaError) and common.out_of_memory and shares.grows:
            if not shares.is_divided and self._can_be_divided:
                return True
            most = shares.most_slices(lengths)
            if now < most:
                self._splitter.slices[key] = min(2 * now, most)
                self._full[key] = describe([common.context])
                return False
            noted(common, 'it was computed in up to %d slices (mgpu.micro_batches=auto)' % now)
        self._full.pop(key, None)
        raise_error(common, error)

    def note(self, lengths: Sequence[int]) -> None:
        """Say in how many slices a batch was computed, if it had to be repeated."""
        context = self._full.pop(tuple(lengths), None)
        if context is not None:
            rank_process.note('%s: from now on, batches of %d samples are computed in %d slices, because %s has too '
                              'little memory (mgpu.micro_batches=auto)'
                              % (self._name, sum(lengths) if self._splitter.shares.is_sharded else lengths[0],
                                 self._splitter.slices[tuple(lengths)], context))
