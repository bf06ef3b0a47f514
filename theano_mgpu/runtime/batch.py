"""A batch that is split: the shard of each replica, and the values that are known in the course of a step."""
from __future__ import annotations

import collections
from typing import Any, Collection, Iterable, Mapping, NamedTuple, Sequence

import numpy as np
import theano

from ..comm.tree import Tree
from ..devices.context_map import Context
from ..devices.launcher import Shard
from ..devices.transfers import DeviceBuffers
from ..plan import Choice, Part, Shares, StepPlan
from ..plan.lowering import Division, StepProgram, divided, lowered
from ..plan.shares import equal_sizes, ranges
from .batches.data_set_rows import DataSet


class Split(NamedTuple):
    """The way in which batches of some lengths are split."""

    shards: Sequence[Shard]            # in the order of their samples
    rounds: Sequence[Sequence[Shard]]  # a list a micro-batch, with a shard for each replica with samples
    samples: int                       # of all ranks together
    lengths: Sequence[int]             # the samples that each rank works on
    idle: bool                         # this rank has no samples, and takes part with one that does not count
    division: Division
    tree: Tree | None                  # the order in which the parts of logical shards are added
    program: StepProgram
    slots: Sequence[Any]               # of a batch without arguments: with the numbers in `Program.numbers`
    pieces: Sequence[slice]            # the samples of each shard


class Crew(NamedTuple):
    """The contexts that compute a step.

    The first `n` replicas of this process have samples; `are_forked` says whether processes compute for all but one.
    """

    n: int
    are_forked: bool


class Batch(NamedTuple):
    """A batch that is split."""

    split: Split
    slots: list[Any]  # the values that are known in the course of a step; at first, the inputs
    buffers: list[dict[Context, DeviceBuffers]]  # of each shard: the memory that its values are sent to
    crew: Crew | None = None  # for all contexts of this process, as they are


class Splitter:
    """A splitter of batches by the shares of a plan. It keeps the memory on the devices for their inputs.

    Inputs `with_samples` have them along axis 0; every replica gets the others whole.
    """

    def __init__(self, plan: StepPlan, split: Collection[theano.Variable], compiled: Mapping[Part, Any] | None = None):
        self._plan, self.with_samples, self._compiled = plan, frozenset(split), compiled
        self._on_devices = plan.mesh.on_devices
        self._programs: dict[Division, StepProgram] = {}
        self.use(plan.shares)
        self.slices: dict[tuple[int, ...], int] = {}  # by `key`, where a device had too little memory for the plan's
        self._buffers: dict[int, Any] = collections.defaultdict(collections.deque)
        # While a batch is computed, the next one is sent. The inputs of several parts are read in the whole step.
        self._turns = 2 if sum(len(stage.parts) for stage in plan.stages) == 1 else None

    def use(self, shares: Shares, measured: Sequence[int] = ()) -> None:
        """Split further batches by other shares, chosen by the times of steps with so many samples for each rank."""
        self.shares, self.measured = shares, measured
        self._splits: dict[Any, Split] = {}

    def key(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the key of `slices` for the samples that the ranks are given: of their own, or the whole batch.

        Its sum is the number of samples of the batch, on all ranks.
        """
        return tuple(lengths) if self.shares.is_sharded else (lengths[0],)

    def slice(self, lengths: Sequence[int], number: int) -> None:
        """Split batches of some lengths into a number of slices, and free the memory of inputs that were larger."""
        self.slices[self.key(lengths)] = number
        self._buffers.clear()

    def changes(self) -> list[Choice]:
        """Return the choices of the plan that its steps have changed: shares by speed, slices for lack of memory."""
        changed = []
        if self.measured:
            changed.append(Choice('shares', ' + '.join(map(str, self.shares.sizes(self.measured))),
                                  'mgpu.shares=auto: by measured speeds, for batches of %d samples'
                                  % sum(self.measured)))
        for key, number in sorted(self.slices.items()):
            changed.append(Choice('slices', '%d for batches of %d samples' % (number, sum(key)),
                                  'a device had too little memory for fewer'))
        return changed

    def split(self, values: Iterable[tuple[theano.Variable, Any]], lengths: Sequence[int],
              crew: Crew | None = None) -> Batch:
        """Split a batch, by its inputs and the samples that each rank was given: of its own, or the whole batch.

        A crew, if there is one, divides the part of this process. Rows of data sets are in memory that processes share.
        """
        given, are_forked = self.key(lengths), crew is not None and crew.are_forked
        key = given, self.slices.get(given), crew and crew.n
        split = self._splits.get(key)
        if split is None:
            split = self._splits[key] = self._split(lengths, *key[1:])
        program, slots = split.program, list(split.slots)
        for variable, value in values:
            of_shards = program.of_shards.get(variable)
            if of_shards is None:
                slots[program.common[variable]] = value
            else:
                parts = map(value.__getitem__, split.pieces) if not isinstance(value, DataSet) else \
                    value.parts(split.pieces, self._on_devices and not split.division.waits_on_host, are_forked)
                for slot, part in zip(of_shards, parts):
                    slots[slot] = part
        if not self._on_devices:
            return Batch(split, slots, [], crew)
        turns = 0 if split.division.waits_on_host else self._turns or len(split.rounds) + 1
        return Batch(split, slots, [self._buffers_of(shard.replica, turns) for shard in split.shards])

    def _split(self, lengths: Sequence[int], slices: int | None, n: int | None) -> Split:
        shares, machine, given = self.shares, self.shares.machine, self.key(lengths)
        total, before, own = lengths[0], 0, lengths[0]
        if shares.is_sharded:
            total, before, own = sum(lengths), sum(lengths[:machine.rank]), lengths[machine.rank]
        else:
            lengths = shares.lengths(total)
        rounds, tree, first = shares.rounds(own, slices), None, 0
        if n is not None and len(rounds) == 1 and n < len(rounds[0]) and not shares.logical_shards:
            spans = [span for _, span in rounds[0]]
            start, stop = spans[0][0], spans[-1][1]
            rounds = [list(enumerate(ranges(equal_sizes(stop - start, n, shares.least_samples), start)))]
        if shares.is_divided and shares.logical_shards:
            tree = Tree(machine.rank, shares.shards_of_ranks(given), shares.shards_of_replicas(given))
            first = tree.first(tree.rank)
        # A process without samples takes part with one sample that does not count. Where a batch is in slices for lack
        # of memory, they wait on the host: a device would keep all of them if their samples meet in several stages.
        works, division = divided(shares, rounds or [[(0, (0, 1))]], slices is not None and len(rounds) > 1)
        shards = [Shard(replica, span, first + i) for i, (replica, span) in enumerate(works)]
        if division not in self._programs:
            self._programs[division] = lowered(self._plan, division, self.with_samples, self._compiled)
        program, (whole, *of_shard) = self._programs[division], self._plan.program.numbers or [None]
        slots: list[Any] = [None] * program.size
        if whole is not None:
            slots[program.common[whole]] = np.array(total, 'int64')
        for i, variable in enumerate(of_shard):
            for slot, (_, (start, stop), _) in zip(program.of_shards[variable], shards):
                slots[slot] = np.array((stop - start, before + start, before)[i], 'int64')
        return Split(shards, [[shards[i] for i in round_] for round_ in division.rounds], total, lengths, not rounds,
                     division, tree, program, slots, [slice(*shard.span) for shard in shards])

    def _buffers_of(self, replica: int, turns: int) -> dict[Context, DeviceBuffers]:
        """Return memory that the last `turns - 1` shards of the replica do not use; for 0 new memory."""
        buffers = self._buffers[replica] if turns else collections.deque()
        if len(buffers) < max(turns, 1):
            contexts = self._plan.mesh.replicas[replica]
            buffers.append({context: DeviceBuffers(context, is_beside=turns > 0) for context in contexts})
        else:
            buffers.rotate(-1)
        return buffers[-1]
