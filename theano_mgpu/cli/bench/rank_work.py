"""The work of a rank that `theano-mgpu bench` measures.

A rank trains blocks of steps. Rank 0 prints each as a line of JSON: one at once, and one for each line ``go`` of its
stdin. The parameter in JSON has the model, its input_shape and optimizer; batch_size, samples in the common batch; and
the steps of a block.
"""
from __future__ import annotations

import json
import sys

from ...comm.collectives import broadcast_object
from ...comm.mpi import mpi_communicator
from ...devices.contexts import init
from .measure import Trainee
from .synthetic_models import Recipe


def work(model: str, input_shape: list[int] | None, optimizer: str, batch_size: int, steps: int) -> None:
    """Train blocks as a rank, until rank 0's stdin ends."""
    init()
    ranks, recipe, go = mpi_communicator(), Recipe(model, input_shape, optimizer), True
    trainee = Trainee(recipe.replicate(1), recipe, batch_size)
    while go:
        block = trainee.block(steps)
        if ranks.rank == 0:
            print(json.dumps(block), flush=True)
        go = broadcast_object(ranks, ranks.rank == 0 and sys.stdin.readline() == 'go\n')


if __name__ == '__main__':
    work(**json.loads(sys.argv[1]))
