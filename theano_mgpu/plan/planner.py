"""Plan a step: from a program and the devices to what is compiled, exchanged and computed where."""
from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..analysis import SAME, SUM
from ..devices.context_map import HOST
from ..devices.mesh import CPU, Mesh
from ..graphs.graph import shared_variables
from ..graphs.output_order import by_depth
from ..options import UPDATE_ON, Options
from ..replicas.random_streams import is_random_state
from .buckets import buckets, bytes_of_gradients
from .machine import Machine
from .partition import Exchange, Program, Stage
from .pieces import Piece, Places, cut
from .shares import Shares
from .step_plan import AllReduce, Boundary, Choice, DividedUpdate, Part, ReduceScatter, StagePlan, StepPlan, SumGroup
from .update_shares import update_shares


def plan(program: Program, mesh: Mesh, options: Options, machine: Machine, shares: Optional[Shares] = None,
         refusal: Optional[str] = None) -> StepPlan:
    """Plan the step of a program. Nothing is compiled, opened or exchanged.

    Parameters
    ----------
    program : Program
    mesh : Mesh
        The contexts of this process.
    options : Options
        Its `name`, `recompute` and `update_on` count, and the trained parameters.
    machine : Machine
    shares : Shares, optional
        By default, batches are divided among all replicas.
    refusal : str, optional
        Why the program is not divided, although there are several replicas.

    Returns
    -------
    StepPlan
    """
    return _Planner(program, mesh, options, machine).plan(shares or Shares(machine), refusal)


class _Planner:
    """The values that the parts of a plan are made of."""

    def __init__(self, program, mesh, options, machine):
        self._program, self._mesh, self._options, self._machine = program, mesh, options, machine
        self._places, self._params = Places(mesh), options.internal.params
        n_results = len(program.outputs) - len(program.updated)
        self._results = program.outputs[:n_results]
        new = dict(zip(program.updated, program.outputs[n_results:]))
        self._rows = {variable: output for variable, output in new.items() if output.has_rows}
        self._alike = {variable: output.variable for variable, output in new.items() if output.reduction == SAME}
        self._new = {variable: output.variable for variable, output in new.items() if output.reduction is None}
        self._exchanges = [each for stage in program.stages for each in stage.exchanges] + list(program.exchanges)
        self._given = list(program.given) + program.numbers
        self._choices: List[Choice] = []

    def plan(self, shares: Shares, refusal: Optional[str]) -> StepPlan:
        self._choose('division', 'in %d parts' % shares.n_replicas if shares.n_replicas > 1 else 'whole batches',
                     refusal or ('the graph is exact in parts' if shares.n_replicas > 1 else 'there is one replica'))
        overlaps, where = self._overlaps(), self._where()
        stages = self._stages(overlaps)
        update, divided = self._update(where)
        kept = self._kept(stages)
        owners = self._owners(divided)
        stages, last = self._with_exchanges(stages, owners, self._in_half(owners))
        return StepPlan(self._options.name, self._program, self._mesh, self._machine, shares, tuple(stages), last,
                        tuple(update), tuple(self._results), self._rows, frozenset(kept), tuple(self._params), divided,
                        overlaps, tuple(self._choices))

    # --- choices

    def _choose(self, what, chosen, reason):
        self._choices.append(Choice(what, chosen, reason))

    def _overlaps(self) -> bool:
        """Return whether gradients of one bucket are exchanged while the next one is computed."""
        options, machine = self._options, self._machine
        if not self._params or machine.size * len(self._mesh.replicas) == 1:
            return False
        on = [rank for rank, flag in enumerate(machine.overlap) if flag]
        overlaps = len(on) == machine.size and not options.recompute
        self._choose('exchange', 'while the next gradients are computed' if overlaps else 'once all are computed',
                     'recompute=True' if on and options.recompute else
                     'mgpu.overlap=%s' % (len(on) == machine.size) if len(on) in (0, machine.size) else
                     'mgpu.overlap=True on the ranks %s alone' % ', '.join(map(str, on)))
        return overlaps

    def _where(self) -> str:
        """Return where the new values that replicas need are made."""
        wanted = self._machine.update_on
        where = min(wanted, key=UPDATE_ON.index)  # an order on which all ranks agree
        if self._new:
            self._choose('update', {'device': 'on each context', 'sharded': 'each parameter on one of the contexts',
                                    'host': 'on the host'}[where],
                         self._options.why_updates_on(self._mesh.contexts) if len(set(wanted)) == 1 else
                         'the ranks would choose %s' % ', '.join(wanted))
        return where

    # --- stages

    def _stages(self, overlaps: bool) -> List[Tuple[Stage, List[Part]]]:
        sizes = bytes_of_gradients(self._exchanges, self._params, self._new) if overlaps else {}
        return [(stage, self._parts_of(i, stage, buckets(stage.outputs, sizes) if overlaps else ()))
                for i, stage in enumerate(self._program.stages) if stage.outputs]

    def _parts_of(self, i: int, stage: Stage, in_buckets) -> List[Part]:
        name, n = self._options.name, len(self._program.stages)
        if n > 1:
            name = '%s, stage %d of %d' % (name or 'a function', i + 1, n)
        exchanged = [each.variable for earlier in self._program.stages[:i + 1] for each in earlier.exchanges]
        pieces = cut(self._given + exchanged + list(stage.carried), stage.outputs, self._places.among(stage.carried),
                     self._options.recompute, in_buckets)
        after = self._kept_after_stages().union(each.source for each in self._exchanges)
        parts: List[Part] = []
        later: Set[theano.Variable] = set()
        for piece in reversed(pieces):
            parts.insert(0, self._part_of(piece, after, later, name))
            later.update(piece.given)
        return parts

    def _part_of(self, piece: Piece, after, later, name) -> Part:
        """Return the part of a piece; `after` is read after the stage, `later` by later pieces."""
        graphs = by_depth(dict(zip(piece.outputs, piece.graphs)))
        updates = {variable: graphs[new] for variable, new in self._alike.items() if new in graphs}
        outputs = [variable for variable in graphs if variable in after or variable in later]
        last = [v for v in piece.given if v.owner is not None and v not in after and v not in later]
        return Part(tuple(piece.given), tuple(piece.stand_ins), tuple(outputs), tuple(graphs[v] for v in outputs),
                    updates, tuple(self._mesh.column(piece.place)), name, piece.level, tuple(last))

    def _kept_after_stages(self) -> Set[theano.Variable]:
        """Return what a replica has to keep after the stages that compute it, but for what it gives to sums."""
        kept = {source for stage in self._program.stages for source in stage.carried.values()}
        return kept.union(output.variable for output in self._results + list(self._rows.values()))

    def _kept(self, stages) -> Set[theano.Variable]:
        """Return what a replica keeps beside what it only gives to sums: sums that a later part reads, too."""
        sources = {each.source for each in self._exchanges}
        taken = {variable for _, parts in stages for part in parts for variable in part.given}
        return self._kept_after_stages() | sources & taken

    # --- the update

    def _update(self, where: str) -> Tuple[List[Part], Optional[DividedUpdate]]:
        """Plan what is computed of exchanged values: new values and results, on the host and on the contexts."""
        exchanged = [exchange.variable for exchange in self._exchanges]
        given, new = self._given + exchanged, self._new
        results = [output.variable for output in self._results if output.reduction is None]
        results = [variable for variable in dict.fromkeys(results) if variable not in exchanged]
        here, light = self._on_host(results) if where != 'host' else (list(new), results)
        update = [self._update_part(given, [v for v in results if v in light], here, [HOST], self._mesh.contexts)]
        heavy = [v for v in results if v not in light]
        of_ranks: List[List[SharedVariable]] = [[] for _ in range(self._machine.size)]
        divided = []
        for place in self._mesh.places:
            there = [v for v in new if v not in here and self._places.of(v) == place]
            contexts, shares = self._mesh.column(place), []
            if where == 'sharded':
                divided += there
                there, shares = self._shares(there, of_ranks)
            update.append(self._update_part(given, heavy, there, contexts if there else contexts[:1]))
            update += [self._update_part(given, [], share, [context], contexts, is_share=True)
                       for share, context in zip(shares, contexts)]
            heavy = []
        return [part for part in update if part.outputs or part.updates], self._divided(of_ranks, divided)

    def _on_host(self, results):
        """Return the variables that are updated on the host, and the results that are computed there."""
        new, idle = self._new, self._not_read_by_replicas()
        light = [v for v in results + list(new.values()) if _reads(v) <= idle]
        here = [v for v in new if v in idle and new[v] in light or self._places.of(v) == CPU]
        # The host has all variables; a device would get a copy of those of the others.
        light += [v for v in results if v not in light and len({self._places.of(each) for each in _reads(v)}) > 1]
        return here, light

    def _not_read_by_replicas(self):
        """Return the variables that no replica needs: no stage reads them, nor the new value of another one."""
        idle = {v for v in self._new if not is_random_state(v)}
        idle -= _reads(*[variable for stage in self._program.stages for variable in stage.outputs])
        while True:
            needed = idle & _reads(*[value for variable, value in self._new.items() if variable not in idle])
            if not needed:
                return idle
            idle -= needed

    def _shares(self, variables, of_ranks):
        """Return the variables that each context updates, and those of each of this rank's contexts; add the others'.
        """
        machine = self._machine
        common, shares = update_shares(variables, self._new, machine.n_replicas)
        bounds = [sum(machine.replicas[:rank]) for rank in range(machine.size + 1)]
        for rank, own in enumerate(of_ranks):
            own += sum(shares[bounds[rank]:bounds[rank + 1]], [])
        return common, shares[bounds[machine.rank]:bounds[machine.rank + 1]]

    def _divided(self, of_ranks, updated) -> Optional[DividedUpdate]:
        if self._machine.size == 1 or not any(of_ranks):
            return None
        values = [self._new[variable] for variable in updated]
        read = tuple(shared_variables(values + updated))
        sent = frozenset(v for v in sum(of_ranks, []) if v in self._read_on_every_rank(of_ranks))
        return DividedUpdate(tuple(map(tuple, of_ranks)), sent, read)

    def _read_on_every_rank(self, of_ranks):
        """Return all that the stages, the results and the undivided part of an update are made of."""
        divided = set(sum(of_ranks, []))
        read = [variable for stage in self._program.stages for variable in stage.outputs]
        read += [value for variable, value in self._new.items() if variable not in divided]
        return set(ancestors(read + [output.variable for output in self._results]))

    def _update_part(self, given, outputs, updated, contexts, copied_to=(), is_share=False) -> Part:
        updates = {variable: self._new[variable] for variable in updated}
        reads = set(ancestors(outputs + list(updates.values())))
        given = tuple(variable for variable in dict.fromkeys(given) if variable in reads)
        return Part(given, given, tuple(outputs), tuple(outputs), updates, tuple(contexts), self._options.name,
                    copied_to=tuple(copied_to), is_share=is_share)

    # --- exchanges

    def _owners(self, divided: Optional[DividedUpdate]) -> Dict[theano.Variable, int]:
        """Return the rank that reads a sum, for sums that only one rank reads."""
        if divided is None:
            return {}
        by_all = self._read_on_every_rank(list(map(list, divided.shares)))
        read = [set(ancestors([self._new[variable] for variable in share])) for share in divided.shares]
        owners = {}
        for variable in (exchange.variable for exchange in self._exchanges):
            ranks = [rank for rank, variables in enumerate(read) if variable in variables]
            if len(ranks) == 1 and variable.ndim and variable not in by_all:
                owners[variable], = ranks
        return owners

    def _in_half(self, owners) -> Set[theano.Variable]:
        """Return the sums of arrays that the new values of trained parameters depend on, if ranks exchange float16."""
        if not self._params or self._machine.size == 1 or not all(self._machine.half):
            return set()
        self._choose('precision', 'gradients are exchanged as float16', 'mgpu.exchange=float16')
        made = ancestors([self._new[param] for param in self._params if param in self._new])
        last = {exchange.variable for exchange in self._program.exchanges if exchange.variable.ndim}
        return last.intersection(made).difference(owners)

    def _with_exchanges(self, stages, owners, in_half) -> Tuple[List[StagePlan], Boundary]:
        """Return the stages with what is exchanged before each, and what is exchanged after the last one."""
        every_part = [part for _, parts in stages for part in parts]
        sums: Dict[Part, List[SumGroup]] = {part: [] for part in every_part}
        boundaries = []
        for exchanges in [stage.exchanges for stage, _ in stages] + [self._program.exchanges]:
            additive = [each for each in exchanges
                        if each.reduction == SUM and each.source.dtype.startswith('float')]
            groups = []
            for part in every_part:
                own = [each for each in additive if each.source in part.outputs]
                of_part = list(_groups(own, owners, in_half))
                sums[part] += of_part
                groups += of_part
            boundaries.append(Boundary(tuple(exchanges), tuple(groups),
                                       tuple(each for each in exchanges if each not in additive)))
        return [StagePlan(boundary, stage.carried, tuple(_with_sums(part, sums[part]) for part in parts))
                for boundary, (stage, parts) in zip(boundaries, stages)], boundaries[-1]


def _groups(exchanges: Sequence[Exchange], owners: Mapping[theano.Variable, int], in_half) -> Iterable[SumGroup]:
    """Yield the sums that are exchanged together, by the collective that adds them."""
    owned = [each for each in exchanges if each.variable in owners]
    half = [each for each in exchanges if each.variable in in_half]
    others = [each for each in exchanges if each not in owned and each not in half]
    for some, collective in ((others, AllReduce()), (half, AllReduce(half=True)),
                             (owned, ReduceScatter(tuple(owners[each.variable] for each in owned)))):
        if some:
            yield SumGroup(tuple(some), collective)


def _with_sums(part: Part, sums: Sequence[SumGroup]) -> Part:
    return replace(part, sums=tuple(sums)) if sums else part


def _reads(*variables):
    return {v for v in ancestors(variables) if hasattr(v, 'container')}
