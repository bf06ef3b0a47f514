"""The work of a rank that `theano-mgpu bench` measures.

After the warm-up of all ranks, rank 0 prints ``ready``. For each line ``go`` of its stdin it prints a line of JSON, a
list of Blocks.
"""
import json
import sys
import time
from collections import namedtuple

import numpy as np
from theano.configparser import change_flags

from ...devices.contexts import init
from ...distributed.activities import SHARE
from ...distributed.mpi import import_mpi, mpi_communicator
from .measure import Block, Trainee, cold_buffers, means, reduce_rate
from .models import Recipe

NAP = 0.005  # seconds between two polls of an idle rank, which must leave its core to the process that is timed
MESSAGES = 20  # of each size, for a link's latency and bandwidth

# `sizes` are batch sizes of one rank by itself; `steps` those of a block; the rest is that of a Recipe.
Settings = namedtuple('Settings', 'model input_shape optimizer batch_size sizes steps')


def work(text):
    """Measure, for each line on the first rank's stdin until it ends, what Settings in JSON say."""
    settings = Settings(**json.loads(text))
    init()
    comm = import_mpi().COMM_WORLD.Dup()  # apart from the messages of what is measured
    recipe = Recipe(settings.model, settings.input_shape, settings.optimizer)
    turn = together(recipe, comm, settings) if comm.size > 1 else alone(recipe, settings)
    if comm.rank == 0:
        print('ready', flush=True)
    while broadcast(comm, comm.rank == 0 and sys.stdin.readline().strip() == 'go'):
        blocks = turn()
        if comm.rank == 0:
            print(json.dumps([block._asdict() for block in blocks]), flush=True)


def broadcast(comm, go):
    """Return rank 0's value of `go`, on each rank; ranks sleep while they wait."""
    flag = np.array([go], 'int32')
    request = comm.Ibcast(flag, 0)
    while not request.Test():
        time.sleep(NAP)
    return bool(flag[0])


def compiled(recipe, sizes):
    """Return a Trainee of this rank that has compiled its functions for some batch sizes."""
    trainee = Trainee(recipe.replicate(1), recipe, max(sizes))
    for size in sizes:
        trainee.steps(size, 1)
    return trainee


def alone(recipe, settings):
    """Return a function that measures one rank: a Block of its step at each batch size."""
    trainee = compiled(recipe, settings.sizes)
    return lambda: [trainee.block('ranks', 1, size, settings.steps) for size in settings.sizes]


def together(recipe, comm, settings):
    """Return a function that measures several ranks: their common step; a step of each by itself, all at the same time.

    The model predicts the common step from the time of the separate steps, in which the ranks of a host share its
    memory and perhaps its cores, and from the time of an exchange.
    """
    with change_flags(**{'mgpu.executor': 'serial'}):  # keeps a function to its rank
        apart = compiled(recipe, settings.sizes)
    joint = compiled(recipe, [settings.batch_size])

    def common():
        comm.Barrier()
        return joint.block('ranks', comm.size, settings.batch_size, settings.steps)
    parts = [common] + [lambda size=size: block_apart(apart, comm, size, settings.steps) for size in settings.sizes]

    def turn():
        parts.reverse()  # by turns the common step is the first or the last
        blocks = [part() for part in parts]
        figures = link_figures(comm, joint.n_bytes)
        return [block._replace(figures=figures) for block in blocks]
    return turn


def block_apart(trainee, comm, size, n_steps):
    """Return a Block of steps of each rank by itself."""
    # They begin each step together, and wait as in a common step, which slows others down where cores are scarce.
    seconds, phases = trainee.steps(size, n_steps, before=lambda: mpi_communicator().handshake((SHARE,)))
    phases = [dict(each, other=max(0.0, step - sum(each.values()))) for step, each in zip(seconds, phases)]
    # In a common step each phase lasts until the slowest rank has finished it.
    slowest = means([{name: max(each[name] for each in step) for name in step[0]}
                     for step in zip(*comm.allgather(phases))])
    return Block('apart', comm.size, size, sum(slowest.values()), slowest)


def link_figures(comm, n_bytes):
    """Measure how fast a rank adds gradients, and the latency and bandwidth between ranks."""
    comm.Barrier()
    rate = reduce_rate(n_bytes, 1)
    chunk = max(1024, n_bytes // comm.size)
    latency = ring_step(comm, 8)
    return {'reduce_bytes_per_s': rate, 'latency_s': latency,
            'bytes_per_s': chunk / max(ring_step(comm, chunk) - latency, 1e-9)}


def ring_step(comm, n_bytes):
    """Return the median seconds in which each rank sends to the next one and receives from the one before."""
    pool = cold_buffers(n_bytes, 2)
    seconds = []
    for number in range(MESSAGES):
        sent, received = pool[number % len(pool)]
        comm.Barrier()
        start = time.perf_counter()
        comm.Sendrecv(sent, (comm.rank + 1) % comm.size, 0, received, (comm.rank - 1) % comm.size, 0)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
