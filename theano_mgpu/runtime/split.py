"""Split the values of a call into the shards of a batch."""
import collections
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import theano

from ..plan import StepPlan
from ..replicas.transfers import DeviceBuffers
from .batch import Batch, Outbox, Shard, Values


class Splitter:
    """Splits batches as a plan says, and has the memory on the devices that their inputs are sent to.

    Parameters
    ----------
    plan : StepPlan
    split : list of theano.Variable
        Inputs that have samples along axis 0; every replica gets the others whole.

    Attributes
    ----------
    shapes : dict of theano.Variable to tuple of int, or None
        Those of the first replica's inputs in the first batch.
    """

    def __init__(self, plan: StepPlan, split: Sequence[theano.Variable]):
        self._plan, self._split, self._shares = plan, set(split), plan.shares
        self._total, *self._of_shard = plan.program.numbers or [None]
        self._rounds: Dict[int, List[List[Tuple[int, int]]]] = {}
        self._lengths: Dict[int, List[int]] = {}
        self._buffers: Dict[int, Any] = {}
        # While a batch is computed, the next one is sent. The inputs of several parts are read in the whole step.
        self.shapes: Optional[Dict[theano.Variable, Tuple[int, ...]]] = None
        self._turns = 2 if sum(len(stage.parts) for stage in plan.stages) == 1 else None

    def split(self, values: Values, lengths: Sequence[int], alone: bool = False) -> Batch:
        """Split a batch.

        Parameters
        ----------
        values : dict of theano.Variable to ndarray
            The inputs of this process.
        lengths : list of int
            Samples that each rank was given: of its own, or the whole batch.
        alone : bool
            Whether the first replica is to have all of it.

        Returns
        -------
        Batch
        """
        shares, machine = self._shares, self._shares.machine
        if shares.is_sharded:
            total, before, own = sum(lengths), sum(lengths[:machine.rank]), lengths[machine.rank]
        else:
            total, before, own = lengths[0], 0, lengths[0]
            lengths = self._memoized(self._lengths, shares.lengths, total)
        rounds = [[(0, own)]] if alone else self.rounds(own)
        alone = alone or not shares.is_divided or \
            machine.size == machine.n_replicas == len(rounds) == 1 and len(rounds[0]) == 1
        common = {variable: value for variable, value in values.items() if variable not in self._split}
        if self._total is not None:
            common[self._total] = np.array(total, 'int64')
        with_samples = [(variable, value) for variable, value in values.items() if variable in self._split]

        def shard(replica, span):
            start, stop = span
            own = {variable: value[start:stop] for variable, value in with_samples}
            for variable, number in zip(self._of_shard, (stop - start, before + start, before)):
                own[variable] = np.array(number, 'int64')
            return Shard(replica, span, own, self._outbox(replica, self._turns or len(rounds) + 1))
        # A process without samples takes part with one sample that does not count.
        shards = [[shard(replica, span) for replica, span in enumerate(spans)] for spans in rounds or [[(0, 1)]]]
        if self.shapes is None:
            self.shapes = {v: np.shape(value) for v, value in {**common, **shards[0][0].values}.items()}
        return Batch(shards, common, total, lengths, not rounds, alone)

    def rounds(self, length: int) -> List[List[Tuple[int, int]]]:
        """Return the samples of each replica, one list a micro-batch; see `Shares.rounds`."""
        return self._memoized(self._rounds, self._shares.rounds, length)

    def _memoized(self, known, compute, length):
        if length not in known:
            known[length] = compute(length)
        return known[length]

    def _outbox(self, replica: int, turns: int) -> Outbox:
        """Return an outbox with memory that the last `turns - 1` shards of the replica do not use."""
        buffers = self._buffers.setdefault(replica, collections.deque())
        if len(buffers) < turns:
            buffers.append({context: DeviceBuffers(context) for context in self._plan.mesh.replicas[replica]})
        else:
            buffers.rotate(-1)
        return Outbox(buffers[-1])
