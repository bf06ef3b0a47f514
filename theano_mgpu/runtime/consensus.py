"""What ranks make sure of before they compile: that they have the same graph, and the same first values."""
from typing import Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable

from ..distributed.activities import BUILD
from ..distributed.collectives import all_gather_int
from ..distributed.communicator import Communicator
from ..distributed.consistency import take_values_of_first
from ..errors import RankError
from ..graphs import graph
from ..replicas.replicated import Replicated


def check_same_graph(ranks: Communicator, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                     shared: Sequence[SharedVariable]) -> None:
    """Raise a RankError unless all ranks have the same graph over variables of the same shapes."""
    if ranks.size == 1:
        return
    numbers = ranks.handshake((BUILD,), [graph.checksum(inputs, outputs, shared)])[:, 0]
    others = np.flatnonzero(numbers != numbers[0])
    if len(others):
        raise RankError('the ranks have different models: what is computed on rank %s is not what rank 0 computes. Its '
                        'shared variables on %s: %s. Build the same model on every rank; if each rank holds its own '
                        'part of a data set, set mgpu.data=sharded (theano-mgpu launch --sharded)'
                        % (', '.join(map(str, others)), ranks.name(ranks.rank), graph.listing(shared)))


def share_first_values(ranks: Communicator, variables: Sequence[Replicated]) -> None:
    """Give variables that are new to the ranks the values that rank 0 has."""
    new = _new_on_a_rank(ranks, variables)
    if ranks.size > 1 and new:
        take_values_of_first(ranks, new)
    for variable in new:
        variable.shared, variable.touched = True, False


def _new_on_a_rank(ranks, variables):
    """Return the variables that are new on any rank: each rank's garbage collector decides when an unused one is gone.
    """
    new = []
    for start in range(0, len(variables), 60):  # as many as an integer has bits
        some = variables[start:start + 60]
        masks = all_gather_int(ranks, sum((not variable.shared) << i for i, variable in enumerate(some)))
        new += [variable for i, variable in enumerate(some) if any(mask >> i & 1 for mask in masks)]
    return new
