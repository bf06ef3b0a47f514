"""The lowering of a plan to the instructions of a step, once for each way in which a batch is divided."""
from __future__ import annotations

import itertools
from typing import Any, Collection, Iterable, Mapping, NamedTuple, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable

from ..devices.context_map import HOST, Context
from ..graph.graph import taken_on_device
from . import instructions
from .instructions import Move, New, PartOnContext, Slots
from .parts import Boundary, Part, StagePlan
from .shares import Shares, Work


class Division(NamedTuple):
    """The way in which a batch is divided.

    Attributes
    ----------
    replicas : tuple of int
        The replica of each shard; shards are in the order of their samples.
    rounds : tuple of tuple of int
        For each micro-batch the numbers of its shards.
    alone : bool
        Whether one replica has the whole batch: its values stay on its device.
    waits_on_host : bool
        Whether the values of a micro-batch are on the host while the devices compute others.
    """

    replicas: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]
    alone: bool
    waits_on_host: bool


def divided(shares: Shares, rounds: Sequence[Sequence[Work]],
            waits_on_host: bool = False) -> tuple[list[Work], Division]:
    """Return the shards of a batch in the order of their samples, and the Division; for rounds as of `Shares.rounds`.

    Examples
    --------
    >>> from theano_mgpu.plan import Machine
    >>> shares = Shares(Machine(replicas=(2,)), micro_batches=2)
    >>> shards, division = divided(shares, shares.rounds(4))
    >>> shards, division.rounds
    ([(0, (0, 1)), (0, (1, 2)), (1, (2, 3)), (1, (3, 4))], ((0, 2), (1, 3)))
    """
    shards = sorted((work for round_ in rounds for work in round_), key=lambda work: work[1])
    alone = not shares.is_divided or not shares.logical_shards and \
        shares.machine.size == shares.machine.n_replicas == len(rounds) == 1 and len(rounds[0]) == 1
    return shards, Division(tuple(replica for replica, _ in shards),
                            tuple(tuple(map(shards.index, round_)) for round_ in rounds), alone, waits_on_host)


def schedule(parts: Sequence[Any], n_rounds: int) -> list[list[tuple[Any, int]]]:
    """Return the clock cycles of a pipeline of parts with a `level` each, and `n_rounds` micro-batches.

    A cycle has the parts that are started, each with the number of its micro-batch: the one that the level before has
    worked on in the last cycle. The cycles are as in torchgpipe's ``clock_cycles`` (Kim et al., 2020), with the
    backward pass among the levels: once the pipeline is full, each device computes one forward and one backward piece a
    cycle, as in PipeDream-flush (Narayanan et al., 2021). The bubble is as in GPipe (Huang et al., 2019), ``(n - 1) /
    (m + n - 1)`` of the time for n devices and m micro-batches, but no device keeps the activations of more than 2 n -
    1 micro-batches.

    Examples
    --------
    >>> from collections import namedtuple
    >>> Piece = namedtuple('Piece', 'name level')
    >>> for cycle in schedule([Piece('forward', 0), Piece('middle', 1), Piece('backward', 2)], 2):
    ...     print(*['%s %d' % (piece.name, number) for piece, number in cycle], sep=', ')
    forward 0
    forward 1, middle 0
    middle 1, backward 0
    backward 1
    """
    return [[(part, clock - part.level) for part in parts if 0 <= clock - part.level < n_rounds]
            for clock in range(n_rounds + max(part.level for part in parts))]


class StepProgram(NamedTuple):
    """The instructions of a step, each with its name and the slots that no later one needs.

    Attributes
    ----------
    stages, update : list of (str, instruction, tuple of int)
        Devices may still compute the last stage when all `stages` have run.
    size : int
        The number of slots.
    of_shards : dict of theano.Variable to tuple of int
        For each input with samples the slot of each shard.
    common : dict of theano.Variable to int
        The slots of the other inputs.
    results : tuple of int
        The slots of the plan's results.
    """

    stages: Sequence[tuple[str, Any, Slots]]
    update: Sequence[tuple[str, Any, Slots]]
    size: int
    of_shards: dict[theano.Variable, Slots]
    common: dict[theano.Variable, int]
    results: Slots


def lowered(plan: Any, division: Division, with_samples: Collection[theano.Variable],
            compiled: Mapping[Part, Any] | None = None) -> StepProgram:
    """Return the instructions of a step; inputs `with_samples` are divided among the shards.

    Without the `compiled` parts, it is assumed that each value is taken on the device, as by functions unless Theano
    moves an op to the host.
    """
    lowering = _Lowering(plan, division, with_samples, compiled)
    for stage in plan.stages:
        lowering.compute(stage)
    n_in_stages = len(lowering.instructions)
    lowering.exchange(plan.last)
    for _, parts in itertools.groupby(plan.update, lambda part: None if part.is_share else part):
        lowering.update(list(parts))
    results = lowering.store_and_fetch()
    ended: list[list[int]] = [[] for _ in lowering.instructions]
    for slot, i in lowering.last.items():
        if slot not in results:
            ended[i].append(slot)
    steps = [(type(each).__name__.lower(), each, tuple(slots)) for each, slots in zip(lowering.instructions, ended)]
    return StepProgram(steps[:n_in_stages], steps[n_in_stages:], lowering.size, lowering.of_shards, lowering.common,
                       results)


class _Lowering:
    """The instructions so far, and the slots of the values that are known after them."""

    def __init__(self, plan: Any, division: Division, with_samples: Collection[theano.Variable],
                 compiled: Mapping[Part, Any] | None):
        self._plan, self._division, self._shards = plan, division, range(len(division.replicas))
        self._compiled = compiled
        self._on_devices = plan.mesh.on_devices
        self.size = 0
        self.instructions: list[Any] = []
        self.last: dict[int, int] = {}  # for each slot, the number of the last instruction that uses it
        self.slots: dict[tuple[theano.Variable, int | None], int] = {}  # by variable and shard; None: all of them
        self._moved: dict[tuple[int, Context, int | None], int] = {}     # by slot, context and shard
        self._launched: list[tuple[int, list[PartOnContext]]] = []  # by round, works that are not complete
        self._news: list[New] = []
        self._broadcast: list[tuple[SharedVariable, int]] = []
        total, *of_shard = plan.program.numbers or [None]
        given = [*plan.program.given, *([] if total is None else [total])]
        self.of_shards = {v: tuple(self._known(v, shard) for shard in self._shards)
                          for v in [*given, *of_shard] if v in with_samples or v in of_shard}
        self.common = {v: self._known(v) for v in given if v not in with_samples}

    def _add(self, instruction: Any, *used: Iterable[int]) -> None:
        self.last.update((slot, len(self.instructions)) for slots in used for slot in slots)
        self.instructions.append(instruction)

    # --- slots

    def _new(self) -> int:
        self.size += 1
        return self.size - 1

    def _known(self, variable: theano.Variable, shard: int | None = None) -> int:
        """Return a new slot for a value."""
        self.slots[variable, shard] = self._new()
        return self.slots[variable, shard]

    def _slot(self, variable: theano.Variable, shard: int | None) -> int:
        """Return the slot of a value that a shard has, or that all shards have."""
        own = self.slots.get((variable, shard))
        return self.slots[variable, None] if own is None else own

    # --- parts

    def compute(self, stage: StagePlan) -> None:
        """Start the parts of a stage, cycle after cycle, after the exchange before it."""
        self.exchange(stage.boundary)
        for placeholder, source in stage.saved.items():
            self.slots.update(((placeholder, shard), self._slot(source, shard)) for shard in self._shards)
        rounds = self._division.rounds[:1] if stage.once else self._division.rounds
        overlaps = self._on_devices and len(stage.parts) > 1
        for cycle in schedule(stage.parts, len(rounds)):
            # The values of a micro-batch are released before the next one starts. The CPU computes at once. Devices add
            # beside what they are given to compute after that.
            if not overlaps or all(_added_on_devices(works[0].part) for _, works in self._launched):
                self._complete()
            before, self._launched = self._launched, self._start(
                [(number, part, [(self._division.replicas[shard], shard) for shard in rounds[number]])
                 for part, number in cycle], 'host_to_device', 'launch' if self._on_devices else 'run')
            self._complete(before)
        if stage.once:  # the first shard of each replica has computed it for the others
            first = {self._division.replicas[shard]: shard for shard in reversed(self._division.rounds[0])}
            self.slots.update(((variable, shard), self.slots[variable, first[self._division.replicas[shard]]])
                              for part in stage.parts for variable in part.outputs for shard in self._shards)

    def update(self, parts: Sequence[Part]) -> None:
        """Compute a part of the update, or a share of it on each context, from the values that were exchanged last."""
        on = [(0, part, [(place, None) for place in range(1 if self._division.alone else len(part.contexts))])
              for part in parts]
        for _, works in self._start(on, 'broadcast', 'update'):
            self._note_new(works)

    def _start(self, cycle: Sequence[tuple[int, Part, Sequence[tuple[int, int | None]]]], sending: str,
               phase: str) -> list[tuple[int, list[PartOnContext]]]:
        """Start parts, each at some places and on their shards; return the works of each."""
        moves: list[list[Move]] = []
        launched = [(number, [self._work(part, place, shard, moves) for place, shard in on])
                    for number, part, on in cycle]
        works = [work for _, each in launched for work in each]
        contexts, shards = tuple(work.context for work in works), tuple(work.shard for work in works)
        if any(moves):
            self._add(instructions.Send(tuple(map(tuple, moves)), contexts, shards, sending),
                      [slot for each in moves for move in each for slot in move[:2]])
        self._add(instructions.Launch(tuple(works), contexts, shards, phase),
                  [slot for work in works for slot in work.given + work.made])
        return launched

    def _work(self, part: Part, place: int, shard: int | None, every_moves: list[list[Move]]) -> PartOnContext:
        """Return the work of a part, and add a list with the moves of its arguments."""
        context, function = part.contexts[place], None
        takes = [context.kind != 'cpu' and taken_on_device(variable) for variable in part.given]
        order: Iterable[int] = range(len(part.outputs) + len(part.updates))
        if self._compiled is not None:
            function, takes, order = self._compiled[part].function_of(place)
        every_moves.append([])
        given = tuple(self._moved_to(variable, context if on_device else HOST, shard, every_moves[-1])
                      for variable, on_device in zip(part.given, takes))
        counts = shard is not None or not place  # of the update, the results on the first context do
        made = [self._known(variable, shard) if counts else self._new() for variable in part.outputs]
        made += [self._new() for _ in part.updates]
        return PartOnContext(part, place, context, shard, given, tuple(made), function, tuple(made[i] for i in order))

    def _moved_to(self, variable: theano.Variable, context: Context, shard: int | None, moves: list[Move]) -> int:
        """Return the slot of a value on a context; it goes there once."""
        source = self._slot(variable, shard)
        if not self._on_devices:
            return source
        key = source, context, shard
        if key not in self._moved:
            self._moved[key] = self._new()
            moves.append(Move(source, self._moved[key], variable, context))
        return self._moved[key]

    def _complete(self, launched: Sequence[tuple[int, list[PartOnContext]]] | None = None) -> None:
        """Complete parts that were started: wait, add up their sums, and note the new values of the first round."""
        if launched is None:
            launched, self._launched = self._launched, []
        works, division = [work for _, of_round in launched for work in of_round], self._division
        if works and self._on_devices:
            needed = [work for work in works if not division.alone and not _added_on_devices(work.part)]
            self._add(instructions.Wait(tuple(needed), tuple(each for each in works if each not in needed)),
                      [slot for work in needed for slot in work.made[:len(work.part.outputs)]])
        for number, of_round in launched:
            part, contexts = of_round[0].part, tuple(work.context for work in of_round)
            for group in () if division.alone else part.sums:
                parts = tuple(tuple(self.slots[each.source, work.shard] for each in group.exchanges)
                              for work in of_round)
                self._add(instructions.Add(group, number, contexts, parts), *parts)
            if number == 0:
                self._note_new(of_round)
            if division.waits_on_host and self._on_devices and \
                    any(part is stage.parts[-1] for stage in self._plan.stages):
                self._save([work.shard for work in of_round if work.shard is not None])

    def _note_new(self, works: Sequence[PartOnContext]) -> None:
        part, contexts = works[0].part, tuple(work.context for work in works)
        made = [work.made[len(part.outputs):] for work in works]
        owned = [any(variable in each.owners for each in self._plan.broadcasts) for variable in part.updates]
        if not all(owned):
            self._news.append(New(part, contexts, tuple(slot for slots in made for slot, is_owned in zip(slots, owned)
                                                        if not is_owned),
                                  self._compiled and self._compiled[part].storages(contexts, owned)))
        self._broadcast += [(variable, slot) for variable, slot, is_owned in zip(part.updates, made[0], owned)
                            if is_owned]

    def _save(self, shards: Sequence[int]) -> None:
        """Move what shards have to the host; it is sent again where it is needed."""
        slots = {slot for (_, shard), slot in self.slots.items() if shard in shards}
        self.instructions.append(instructions.Save(tuple(shards), tuple(sorted(slots))))
        self._moved = {key: target for key, target in self._moved.items() if key[2] not in shards}

    # --- exchanges and results

    def exchange(self, boundary: Boundary) -> None:
        """Complete the stage before, and exchange values, which every shard knows then."""
        self._complete()
        if self._division.alone:
            self.slots.update(((each.variable, None), self._slot(each.source, 0)) for each in boundary.exchanges)
            return
        # Ranks exchange values in one order: sums under way end before other values are exchanged.
        if boundary.sums or boundary.others and self._plan.overlaps:
            targets = tuple(self._known(each.variable) for group in boundary.sums for each in group.exchanges)
            self._add(instructions.Finish(boundary.sums, targets), targets)
        self._gather([(each.source, each.reduction) for each in boundary.others],
                     [self._known(each.variable) for each in boundary.others], False)

    def _gather(self, values: Sequence[Any], targets: Sequence[int], own: bool) -> None:
        """Put values together, each a variable with its reduction."""
        if values:
            parts = tuple(tuple(self._slot(variable, shard) for shard in self._shards) for variable, _ in values)
            variables, reductions = zip(*values)
            self._add(instructions.Gather(variables, reductions, parts, tuple(targets), own), *parts, targets)

    def store_and_fetch(self) -> Slots:
        """Store the new values, and bring the results to the host; return their slots."""
        plan, with_rows = self._plan, [each for each in dict.fromkeys(self._plan.results) if each.has_rows]
        whole = [each for each in dict.fromkeys(plan.results) if not each.has_rows]
        targets = {each: self._new() for each in [*whole, *with_rows]}
        rows = {variable: self._new() for variable in plan.rows}
        self._gather(list(plan.rows.values()), list(rows.values()), plan.shares.is_sharded)
        self._add(instructions.Store(tuple(self._news), tuple(self._broadcast), tuple(rows.items())), rows.values(),
                  [slot for _, slot in self._broadcast], *[new.slots for new in self._news])
        sources = [self._slot(each.variable, 0) for each in whole]
        self._add(instructions.Fetch(tuple(each.variable for each in whole), tuple(sources),
                                     tuple(targets[each] for each in whole)), sources, targets.values())
        self._gather(with_rows, [targets[each] for each in with_rows], plan.shares.is_sharded)
        return tuple(targets[each] for each in plan.results)


def _added_on_devices(part: Part) -> bool:
    """Return whether devices add all sums of a part: the host need not wait until it is computed."""
    return bool(part.sums) and all(group.way.by_devices for group in part.sums)
