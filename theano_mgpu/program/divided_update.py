"""An update that is divided among processes: each computes new values of some variables, and sends what others need."""
from typing import Any, Collection, Dict, List, Sequence

import numpy as np
from theano.compile.sharedvalue import SharedVariable

from ..distributed.activities import GATHER, READ
from ..distributed.communicator import Communicator
from ..errors import GraphError
from ..replicas.replicated import Replicated, replicated
from ..replicas.transfers import fetch


class DividedUpdate:
    """Which process computes the new values of which variables, and who gets them when.

    What the next step of every process needs, such as parameters, is sent in the step. The rest, such as the state of
    the optimizer, stays where it was computed. It is sent once it is read: by `gather`, on every process.

    Parameters
    ----------
    ranks : Communicator
    shares : list of list of SharedVariable
        Those of each process.
    needed : collection of SharedVariable
        What a step needs on every process.
    """

    def __init__(self, ranks: Communicator, shares: Sequence[Sequence[SharedVariable]],
                 needed: Collection[SharedVariable]):
        self._ranks = ranks
        owned = [(replicated(v), owner) for owner, share in enumerate(shares) for v in share]
        self._sent = [(variable, owner) for variable, owner in owned if variable.variable in needed]
        self._kept = [(variable, owner) for variable, owner in owned if variable.variable not in needed]

    def exchange(self, values: Dict[Replicated, Any]) -> Dict[Replicated, np.ndarray]:
        """New values of other processes, for the values of this one, on the host or on a device."""
        return self._gathered(self._sent, values)

    def leave(self) -> None:
        """A step is committed: each process alone has the latest values of its share."""
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
        """The values of the variables of other processes."""
        arrays = [_checked(variable, values[variable]) if owner == self._ranks.rank else _value(variable)
                  for variable, owner in owned]
        with self._ranks.single_thread:
            self._ranks.handshake((GATHER,))
            found = self._ranks.all_gather_owned(arrays, [owner for _, owner in owned])
        return {variable: value for (variable, owner), value in zip(owned, found) if owner != self._ranks.rank}


def _value(variable: Replicated):
    """A value that may be outdated, of the right shape."""
    return variable.variable.container.storage[0]


def _checked(variable, value):
    value = fetch(value)
    if value.shape != _value(variable).shape:
        raise GraphError("the update of %s changes its shape from %s to %s, which other processes do not know: use "
                         "update_on='device'" % (variable.variable, _value(variable).shape, value.shape))
    return value


def shares_of_ranks(shares: List[List[SharedVariable]], counts: Sequence[int]) -> List[List[List[SharedVariable]]]:
    """The shares of the contexts of each rank, of which there are `counts`.

    Examples
    --------
    >>> shares_of_ranks([['a'], ['b'], ['c']], [2, 1])
    [[['a'], ['b']], [['c']]]
    """
    ends = np.cumsum(counts).tolist()
    return [shares[end - n:end] for n, end in zip(counts, ends)]
