"""A rank that `theano-mgpu bench` measures.

After the warm-up of all ranks, rank 0 prints ``ready`` and the bytes of all gradients. For each line ``go`` of its
stdin it prints a line of JSON, a list of Blocks.
"""
import argparse
import json
import sys
import time

import numpy as np
from theano.configparser import change_flags

from ...devices.contexts import init
from ...distributed.mpi import import_mpi, mpi_ranks
from ...distributed.process_group import SHARE
from .measure import Block, Trainee, cold_buffers, means, reduce_rate
from .models import Recipe

NAP = 0.005  # seconds between two polls of an idle rank, which must leave its core to the process that is timed
MESSAGES = 20  # of each size, for a link's latency and bandwidth


def work(arguments):
    """Follow the commands on the first rank's stdin until it ends."""
    args = parse(arguments)
    init()
    comm = import_mpi().COMM_WORLD.Dup()  # apart from the messages of what is measured
    recipe = Recipe(args.model, args.input_shape, args.optimizer)
    measured = (Together if comm.size > 1 else Alone)(recipe, comm, args)
    if comm.rank == 0:
        print('ready', measured.n_bytes, flush=True)
    while broadcast(comm, comm.rank == 0 and sys.stdin.readline().strip() == 'go'):
        blocks = measured.turn()
        if comm.rank == 0:
            print(json.dumps([block._asdict() for block in blocks]), flush=True)


def broadcast(comm, go):
    """Rank 0's value of `go`, on each rank; ranks sleep while they wait."""
    flag = np.array([go], 'int32')
    request = comm.Ibcast(flag, 0)
    while not request.Test():
        time.sleep(NAP)
    return bool(flag[0])


class Alone:
    """One rank: its step at each batch size."""

    def __init__(self, recipe, comm, args):
        self._args = args
        self._trainee = Trainee(recipe.replicate(1), recipe, max(args.sizes))
        self.n_bytes = self._trainee.n_bytes
        for size in args.sizes:
            self._trainee.steps(size, 1)

    def turn(self):
        """A Block of each size."""
        return [self._trainee.block('ranks', 1, size, self._args.steps) for size in self._args.sizes]


class Together:
    """Several ranks: their common step; a step of each by itself, all at the same time; and the link between them.

    The model predicts the common step from the time of the separate steps, in which the ranks of a host share its
    memory and perhaps its cores, and from the time of an exchange.
    """

    def __init__(self, recipe, comm, args):
        self._comm, self._args, self._ranks = comm, args, mpi_ranks()
        self._joint = Trainee(recipe.replicate(1), recipe, args.batch_size)
        with change_flags(**{'mgpu.executor': 'serial'}):  # keeps a function to its rank
            self._apart = Trainee(recipe.replicate(1), recipe, max(args.sizes))
            for size in args.sizes:
                self._apart.steps(size, 1)
        self._joint_first = True
        self._joint.steps(args.batch_size, 1)
        self.n_bytes = self._joint.n_bytes

    def turn(self):
        """Blocks of the ranks together, and of each apart."""
        parts = [self._block_together] + [lambda size=size: self._block_apart(size) for size in self._args.sizes]
        self._joint_first = not self._joint_first
        blocks = [part() for part in (parts if self._joint_first else parts[::-1])]
        figures = self._figures()
        return [block._replace(figures=figures) for block in blocks]

    def _block_together(self):
        self._comm.Barrier()
        return self._joint.block('ranks', self._comm.size, self._args.batch_size, self._args.steps)

    def _block_apart(self, size):
        # They begin each step together, and wait as in a common step, which slows others down where cores are scarce.
        seconds, phases = self._apart.steps(size, self._args.steps, before=lambda: self._ranks.meet((SHARE,)))
        phases = [dict(each, other=max(0.0, step - sum(each.values()))) for step, each in zip(seconds, phases)]
        # In a common step each phase lasts until the slowest rank has finished it.
        slowest = means([{name: max(each[name] for each in step) for name in step[0]}
                         for step in zip(*self._comm.allgather(phases))])
        return Block('apart', self._comm.size, size, sum(slowest.values()), slowest)

    def _figures(self):
        self._comm.Barrier()
        rate = reduce_rate(self.n_bytes, 1)
        chunk = max(1024, self.n_bytes // self._comm.size)
        latency = self._ring_step(8)
        return {'reduce_bytes_per_s': rate, 'latency_s': latency,
                'bytes_per_s': chunk / max(self._ring_step(chunk) - latency, 1e-9)}

    def _ring_step(self, n_bytes):
        """Median seconds in which each rank sends to the next one and receives from the one before."""
        rank, size = self._comm.rank, self._comm.size
        pool = cold_buffers(n_bytes, 2)
        seconds = []
        for number in range(MESSAGES):
            sent, received = pool[number % len(pool)]
            self._comm.Barrier()
            start = time.perf_counter()
            self._comm.Sendrecv(sent, (rank + 1) % size, 0, received, (rank - 1) % size, 0)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))


def parse(arguments):
    """The command line, which `rank_group` writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('model')
    parser.add_argument('--batch-size', type=int, required=True, help='samples in the whole batch')
    parser.add_argument('--sizes', type=int, nargs='+', required=True, help='batch sizes of one rank by itself')
    parser.add_argument('--steps', type=int, required=True)
    parser.add_argument('--optimizer', required=True)
    parser.add_argument('--input-shape', type=int, nargs='+')
    return parser.parse_args(arguments)
