"""Scatter a batch: which samples each replica works on, and what it is given of them."""
from typing import List, Tuple

import numpy as np

from ..distributed.collectives import all_gather_int, broadcast_object
from ..program import Batch
from .sub_batches import micro_batch_rounds, ranges, sub_batch_sizes


class Scatter:
    """Makes the Batch of the arguments of a call.

    Parameters
    ----------
    arguments : Arguments
    rows : dict of SharedVariable to theano.Variable
        States with a row a sample, and what stands for them in the graph.
    program : Program
    runner : Runner
    is_divided : bool
        Whether a batch is divided among replicas; else each process computes all of it on its first context.
    micro_batches, least_samples : int
        Slices of a sub-batch, and the samples that one has at least.
    sharded : bool
        Whether each process is given samples of its own.

    Attributes
    ----------
    n_replicas : int
        On all ranks.
    """

    def __init__(self, arguments, rows, program, runner, is_divided, micro_batches, least_samples, sharded):
        self._arguments, self._rows, self._runner = arguments, rows, runner
        self._total, *self._own = program.numbers or [None]
        self._ranks, self._n_replicas_here = runner.ranks, len(runner.mesh.replicas)
        self._is_divided, self._sharded = is_divided, sharded
        self._micro_batches, self._least_samples = micro_batches, least_samples
        self._replicas = all_gather_int(self._ranks, self._n_replicas_here)
        self.n_replicas = sum(self._replicas) if is_divided else 1
        self._split = arguments.with_samples + list(rows.values())
        self._whole = [variable for variable, split in zip(arguments.inputs, arguments.split) if not split]
        self._rounds, self._lengths = {}, {}
        self._example = None

    def __call__(self, values, states, lengths, alone=False):
        """Scatter a batch.

        Parameters
        ----------
        values : list of ndarray, or None
            The arguments; None where the data of this process has ended.
        states : dict of SharedVariable to ndarray
            Those with a row a sample.
        lengths : list of int
            Samples that each rank was given: of its own, or the whole batch.
        alone : bool
            Whether the first context is to have all of it.

        Returns
        -------
        Batch
        """
        rank = self._ranks.rank
        if self._sharded:
            values = self._or_example(values, lengths)
            total, before, own = sum(lengths), sum(lengths[:rank]), lengths[rank]
        else:
            total, before, own = lengths[0], 0, lengths[0]
            lengths = self._lengths_of_ranks(total)
        rounds = [[(0, own)]] if alone else self.rounds(own)
        alone = alone or not self._is_divided or self._ranks.size == self._n_replicas_here == len(sum(rounds, [])) == 1
        given = dict(zip(self._arguments.inputs, values))
        given.update((self._rows[variable], value) for variable, value in states.items())
        common = {variable: given[variable] for variable in self._whole}
        if self._total is not None:
            common[self._total] = np.array(total, 'int64')

        def known(start, stop):
            found = {variable: given[variable][start:stop] for variable in self._split}
            found.update(zip(self._own, (np.array(n, 'int64') for n in (stop - start, before + start, before))))
            return found
        # A process without samples takes part with one sample that does not count.
        return Batch(self._runner.shards(rounds or [[(0, 1)]], known), common, lengths, not rounds, alone)

    def rounds(self, length: int) -> List[List[Tuple[int, int]]]:
        """Rounds of sample ranges, one a replica of this process; see `micro_batch_rounds`. None for no samples."""
        if length not in self._rounds:
            self._rounds[length] = self._make_rounds(length)
        return self._rounds[length]

    def _make_rounds(self, length):
        if not length or not self._is_divided:
            return [[(0, length)]] if length else []
        n = self._n_replicas_here if self._sharded else sum(self._replicas)
        rounds = micro_batch_rounds(length, n, self._micro_batches, self._least_samples)
        if not self._sharded:
            first, last = ranges(self._replicas)[self._ranks.rank]
            rounds = [spans[first:last] for spans in rounds]
        return [spans for spans in rounds if spans]

    def _lengths_of_ranks(self, length):
        """Samples of a whole batch that each rank works on."""
        if not self._is_divided or self._ranks.size == 1:
            return [length] * self._ranks.size
        if length not in self._lengths:
            self._lengths[length] = lengths_of_ranks(length, self._replicas, self._least_samples)
        return self._lengths[length]

    def _or_example(self, values, lengths):
        """The arguments, or where this rank's data has ended, those of one sample that some rank has met."""
        if min(lengths) == 0 and (self._example is None or not all(self._arguments.split)):
            # A rank whose first step has no samples has no example. Inputs without samples may change with each call.
            sample = None if values is None else self._arguments.first_sample(values)
            self._example = broadcast_object(self._ranks, sample, int(np.argmax(lengths)))
        elif self._example is None:
            self._example = self._arguments.first_sample(values)
        return self._example if values is None else values


def lengths_of_ranks(length, replicas, least):
    """Samples of a whole batch for each rank, from the number of replicas of each.

    Examples
    --------
    >>> lengths_of_ranks(7, [1, 2], 1)
    [3, 4]
    >>> lengths_of_ranks(1, [1, 1], 1)
    [1, 0]
    """
    sizes = sub_batch_sizes(length, sum(replicas), least)
    return [sum(sizes[start:stop]) for start, stop in ranges(replicas)]
