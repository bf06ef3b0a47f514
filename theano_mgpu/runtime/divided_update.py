"""An update that is divided among processes: each computes new values of some variables, and sends what others need."""
from typing import Any, Dict

import numpy as np

from ..distributed.activities import GATHER, READ
from ..distributed.communicator import Communicator
from ..errors import GraphError
from ..plan import DividedUpdate
from ..replicas.replicated import Replicated, replicated
from ..replicas.transfers import fetch


class UpdateOwners:
    """The processes that have the new values of a divided update, and who sends them when.

    What the next step of every process needs, such as parameters, is sent in the step. The rest, such as the state of
    the optimizer, stays where it was computed. It is sent once it is read: by `gather`, on every process.

    Parameters
    ----------
    ranks : Communicator
    divided : DividedUpdate
    """

    def __init__(self, ranks: Communicator, divided: DividedUpdate):
        self._ranks = ranks
        owned = [(replicated(v), owner) for owner, share in enumerate(divided.shares) for v in share]
        self._sent = [(variable, owner) for variable, owner in owned if variable.variable in divided.sent]
        self._kept = [(variable, owner) for variable, owner in owned if variable.variable not in divided.sent]

    def exchange(self, values: Dict[Replicated, Any]) -> Dict[Replicated, np.ndarray]:
        """Return the new values of other processes, for the values of this one, on the host or on a device."""
        return self._gathered(self._sent, values)

    def leave(self) -> None:
        """Note that a step is committed: each process alone has the latest values of its share."""
        for variable, owner in self._kept:
            variable.divide(self.gather, owner == self._ranks.rank)
        self._ranks.divided.add(self.gather)

    def gather(self) -> None:
        """Give every process the latest values of all shares. All processes have to call it at the same place."""
        self._ranks.handshake((READ,))
        values = {variable: variable.latest() for variable, owner in self._kept if owner == self._ranks.rank}
        found = self._gathered(self._kept, values)
        for variable, _ in self._kept:
            variable.give(found.get(variable))
        self._ranks.divided.remove(self.gather)

    def _gathered(self, owned, values):
        """Return the values of the variables of other processes."""
        arrays = [_checked(variable, values[variable]) if owner == self._ranks.rank else _value(variable)
                  for variable, owner in owned]
        with self._ranks.single_thread:
            self._ranks.handshake((GATHER,))
            found = self._ranks.all_gather_owned(arrays, [owner for _, owner in owned])
        return {variable: value for (variable, owner), value in zip(owned, found) if owner != self._ranks.rank}


def _value(variable: Replicated):
    """Return a value that may be outdated, of the right shape."""
    return variable.variable.container.storage[0]


def _checked(variable, value):
    value = fetch(value)
    if value.shape != _value(variable).shape:
        raise GraphError("the update of %s changes its shape from %s to %s, which other processes do not know: use "
                         "update_on='device'" % (variable.variable, _value(variable).shape, value.shape))
    return value
