"""The work of a rank that predict_scaling.py measures.

After the warm-up of all ranks, rank 0 prints ``ready``. For each line ``go`` of its stdin it prints a line of JSON, a
list of Blocks. The parameter in JSON has the model, its input_shape and optimizer; batch_size, samples in the common
batch; sizes, in the batches of each rank by itself; and the steps of a block.
"""
from __future__ import annotations

import functools
import json
import sys
from typing import Any

from theano_mgpu.cli.bench.measure import Trainee
from theano_mgpu.cli.bench.synthetic_models import Recipe
from theano_mgpu.comm.activities import SHARE
from theano_mgpu.comm.collectives import broadcast_object
from theano_mgpu.comm.mpi import mpi_communicator
from theano_mgpu.comm.mpi_library import import_mpi
from theano_mgpu.devices.contexts import init

import numpy as np
from measured_costs import Block, bytes_of_gradients, cold_buffers, means, median_seconds, reduce_rate
from theano.configparser import change_flags


def work(model: str, input_shape: list[int] | None, optimizer: str, batch_size: int, sizes: list[int], steps: int
         ) -> None:
    """Measure the common step and a step of each rank by itself, for each line of rank 0's stdin until it ends.

    The model predicts the common step from the time of the separate steps, in which the ranks of a host share its
    memory and perhaps its cores, and from the time of an exchange.
    """
    init()
    comm = import_mpi().COMM_WORLD.Dup()  # its messages do not mix with the messages of the measured steps
    ranks, recipe = mpi_communicator(), Recipe(model, input_shape, optimizer)
    joint = Trainee(recipe.replicate(1), recipe, batch_size)
    n_bytes = bytes_of_gradients(joint.model)
    parts = [lambda: [Block('ranks', comm.size, batch_size, *joint.block(steps))]]
    if comm.size > 1:
        with change_flags(**{'mgpu.executor': 'serial'}):  # keeps a function to its rank
            alone = recipe.replicate(1)
            apart = [Trainee(alone, recipe, size) for size in sizes]
        parts += [functools.partial(block_apart, *each, comm, steps) for each in zip(apart, sizes)]
    if comm.rank == 0:
        print('ready', flush=True)
    while broadcast_object(ranks, comm.rank == 0 and sys.stdin.readline().strip() == 'go'):
        parts.reverse()  # by turns the common step is the first or the last
        blocks = []
        for part in parts:
            comm.Barrier()
            blocks += part()
        figures = link_figures(comm, n_bytes) if comm.size > 1 else {}
        if comm.rank == 0:
            print(json.dumps([block._replace(figures=figures)._asdict() for block in blocks]), flush=True)


def block_apart(trainee: Trainee, size: int, comm: Any, n_steps: int) -> list[Block]:
    """Return the Block of steps of all ranks, each by itself."""
    trainee.step()  # does not count: another batch size needs new memory
    phases = []
    for _ in range(n_steps):
        # The ranks begin together, and wait as in a common step: a waiting rank slows others if cores are scarce.
        mpi_communicator().handshake((SHARE,))
        phases.append(trainee.step().phases)
    # In a common step each phase lasts until the slowest rank has finished it.
    slowest = means([{name: max(each[name] for each in step) for name in step[0]}
                     for step in zip(*comm.allgather(phases))])
    return [Block('apart', comm.size, size, sum(slowest.values()), slowest)]


def link_figures(comm: Any, n_bytes: int) -> dict[str, float]:
    """Measure how fast a rank adds gradients, and the latency and bandwidth between ranks."""
    comm.Barrier()
    rate = reduce_rate(n_bytes, 1)

    def ring_step(size: int) -> float:
        def pass_on(sent: np.ndarray, received: np.ndarray) -> None:
            comm.Sendrecv(sent, (comm.rank + 1) % comm.size, 0, received, (comm.rank - 1) % comm.size, 0)
        return median_seconds(pass_on, cold_buffers(size, 2), before=comm.Barrier)
    chunk = max(1024, n_bytes // comm.size)
    latency = ring_step(8)
    return {'reduce_bytes_per_s': rate, 'latency_s': latency,
            'bytes_per_s': chunk / max(ring_step(chunk) - latency, 1e-9)}


if __name__ == '__main__':
    work(**json.loads(sys.argv[1]))
