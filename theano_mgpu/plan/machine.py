"""The processes of a job, as planning has to know them."""
from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class Machine:
    """The processes of a job and what each one has: the same on every rank, but for `rank`.

    It is gathered once for a function (`runtime.consensus.gather_machine`), so that planning exchanges nothing.

    Attributes
    ----------
    rank : int
        The number of this process.
    replicas : tuple of int
        Replicas of each rank.
    update_on : tuple of str
        Where each rank would compute new values, one of `options.UPDATE_ON`.
    overlap : tuple of bool
        Whether each rank has the flag ``mgpu.overlap=True``.
    half : tuple of bool
        Whether each rank has the flag ``mgpu.exchange=float16``.
    """

    rank: int = 0
    replicas: Tuple[int, ...] = (1,)
    update_on: Tuple[str, ...] = ('device',)
    overlap: Tuple[bool, ...] = (False,)
    half: Tuple[bool, ...] = (False,)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.replicas)

    @property
    def n_replicas(self) -> int:
        """The number of replicas of all ranks."""
        return sum(self.replicas)

    @property
    def first_replica(self) -> int:
        """The number of this process's first replica among those of all ranks."""
        return sum(self.replicas[:self.rank])
