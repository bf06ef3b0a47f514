"""An update that is divided among processes: each computes new values of some variables, and sends what others need."""
from __future__ import annotations

from typing import Any, Collection, Sequence

import numpy as np

from ..comm.activities import GATHER, READ
from ..comm.communicator import Communicator
from ..devices.transfers import fetch
from ..errors import GraphError, RankError
from ..plan import DividedUpdate
from .replicas.replicated import Replicated, replicated


class UpdateOwners:
    """The processes that have the new values of a divided update.

    Values that the next step of every process needs, such as parameters, are sent in the step. The others, such as the
    state of the optimizer, stay where they were computed, until one of them is read: by `gather`, on every process.
    """

    def __init__(self, ranks: Communicator, divided: DividedUpdate):
        self._ranks, self._n_shares = ranks, len(divided.shares)
        owned = [(replicated(v), owner) for owner, share in enumerate(divided.shares) for v in share]
        self._sent = [(variable, owner) for variable, owner in owned if variable.variable in divided.sent]
        self._left = [(variable, owner) for variable, owner in owned if variable.variable not in divided.sent]

    def exchange(self, values: dict[Replicated, Any], known: Collection[Replicated]) -> dict[Replicated, np.ndarray]:
        """Return the new values of other processes, for the values of this one, on the host or on a device.

        Variables that are `known` everywhere already are left out; they are the same on each process.
        """
        owned = [(variable, owner) for variable, owner in self._sent if variable not in known]
        return self._gathered(owned, values) if owned else {}

    def leave(self) -> None:
        """Note that a step is committed: each process alone has the latest values of its share."""
        for variable, owner in self._left:
            variable.divide(self.gather, owner == self._ranks.rank)
        self._ranks.divided[self.gather] = None

    def gather(self) -> None:
        """Give every process the latest values of all shares. All processes have to call it at the same place."""
        if self._n_shares > self._ranks.size:
            raise RankError("%s is divided among %d ranks (update_on='sharded'), and this process is a fork of one of "
                            'them: read it on every rank before the fork' % (self._left[0][0].variable, self._n_shares))
        self._ranks.handshake((READ,))
        values = {variable: variable.latest() for variable, owner in self._left if owner == self._ranks.rank}
        of_others = self._gathered(self._left, values)
        for variable, _ in self._left:
            variable.give(of_others.get(variable))
        self._ranks.divided.pop(self.gather, None)

    def _gathered(self, owned: Sequence[tuple[Replicated, int]], values: dict[Replicated, Any]):
        outdated = [variable.variable.container.storage[0] for variable, _ in owned]  # they have the right shape
        arrays = [_checked(variable, values[variable], value) if owner == self._ranks.rank else value
                  for (variable, owner), value in zip(owned, outdated)]
        with self._ranks.single_thread:
            self._ranks.handshake((GATHER,))
            gathered = self._ranks.all_gather_owned(arrays, [owner for _, owner in owned])
        return {variable: value for (variable, owner), value in zip(owned, gathered) if owner != self._ranks.rank}


def check_shape(variable: Replicated, value: Any, old: Any) -> None:
    """Raise a GraphError if a new value has another shape than the old one, which other processes expect."""
    if value.shape != old.shape:
        raise GraphError("the update of %s changes its shape from %s to %s, which other processes do not know: use "
                         "update_on='device'" % (variable.variable, old.shape, value.shape))


def _checked(variable, value, old):
    value = fetch(value)
    check_shape(variable, value, old)
    return value
