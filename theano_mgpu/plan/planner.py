"""The planning of a step: from a program and the devices to parts, exchanges and updates, each with its place."""
from __future__ import annotations

from dataclasses import replace
from typing import Collection, Iterable, Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..comm.tree import Tree
from ..devices.context_map import HOST, Context
from ..devices.mesh import CPU, Mesh
from ..errors import named
from ..graph.analysis import SAME, SUM
from ..graph.graph import (
    by_depth,
    bytes_of_all,
    bytes_of_shared,
    fits_gpu,
    n_axes,
    parts_by_bytes,
    shared_ancestors,
    shared_variables,
)
from ..graph.partition import Exchange, Program, Stage
from ..graph.random_streams import is_random_state
from ..options import AUTO, UPDATE_ON, Options
from ..utils.tables import bytes_text
from .buckets import LEAST, buckets, bytes_of_gradients
from .parts import Boundary, DeviceBroadcast, ExchangeWay, Part, ShardedUpdate, StagePlan, SumGroup
from .pieces import Piece, Places, cut
from .shares import Machine, Shares, against_speeds, ranges
from .step_plan import Choice, StepPlan

LARGE = 1 << 22  # bytes of new values that several cores make faster than one
OF_NCCL = 'float32', 'float64'  # NCCL adds float16 in half precision, the host in single


def plan(program: Program, mesh: Mesh, options: Options, machine: Machine, shares: Shares | None = None,
         refusal: str | None = None) -> StepPlan:
    """Plan the step of a program. Nothing is compiled, opened or exchanged.

    By default, batches are divided among all replicas. Of the options, `name`, `recompute` and `update_on` count, and
    the trained parameters. The `refusal` tells why the program is not divided, although there are several replicas.
    """
    return _Planner(program, mesh, options, machine).plan(shares or Shares(machine), refusal)


class _Planner:
    """The values that the parts of a plan are made of."""

    def __init__(self, program: Program, mesh: Mesh, options: Options, machine: Machine):
        self._program, self._mesh, self._options, self._machine = program, mesh, options, machine
        self._places, self._params = Places(mesh), options.params
        n_results = len(program.outputs) - len(program.updated)
        self._results = program.outputs[:n_results]
        new = dict(zip(program.updated, program.outputs[n_results:]))
        self._rows = {variable: output for variable, output in new.items() if output.has_rows}
        self._alike = {variable: output.variable for variable, output in new.items() if output.reduction == SAME}
        self._new = {variable: output.variable for variable, output in new.items() if output.reduction is None}
        self._exchanges, self._given = program.every_exchange, list(program.given) + program.numbers
        # The values that a replica has to keep after the stages that compute them, beside those that it gives to sums.
        self._kept = {source for stage in program.stages for source in stage.saved.values()}.union(
            output.variable for output in [*self._results, *self._rows.values()])
        self._choices: list[Choice] = []
        self._logical_shards = 0

    def plan(self, shares: Shares, refusal: str | None) -> StepPlan:
        n = shares.n_replicas
        whole = self._program.whole and ', but each replica needs all samples: ' + self._program.whole
        self._choose('division', 'in %d parts' % n if n > 1 else 'whole batches',
                     refusal or ('the graph is exact in parts' + whole if n > 1 else 'there is one replica'))
        self._choose_shares(shares)
        self._logical_shards = shares.logical_shards
        if self._logical_shards:
            self._choose('logical shards', tree_text(self._logical_shards),
                         'mgpu.logical_shards=%d: the same bits on any number of devices' % self._logical_shards)
        if self._options.flags.tf32 and any(context.kind == 'cuda' for context in self._mesh.contexts):
            self._choose('float32', 'TF32 in products and convolutions', 'mgpu.tf32=True: where cuBLAS 11, cuDNN 8 and '
                         'compute capability 8.0, or later, are there')
        if self._options.strategy.data_sets_on_host:
            self._choose('data sets', 'on the host: their slices are sent with each batch',
                         'a device had too little memory')
        for table, most in self._program.tables.items():
            texts = bytes_text(most), bytes_text(bytes_of_shared(table))
            self._choose('table %s' % named(table), 'the rows of a batch, or all', 'the rows that a batch looks up, '
                         'where they are at most %s; else all: %s' % texts)
        sizes = bytes_of_gradients(self._program, self._params) if self._machine.rate or True in self._machine.overlap \
            else {}
        seconds = self._nccl_seconds(sum(sizes.values()))
        overlaps, where, by_nccl = self._overlaps(seconds), self._where(), self._by_nccl(n)
        stages = [(stage, self._parts_of(i, stage, buckets(stage.outputs, sizes) if overlaps else ()))
                  for i, stage in enumerate(self._program.stages) if stage.outputs]
        update, shares_of_update = self._update(where)
        divided = self._divided(shares_of_update)
        # A sum that a later part reads is kept, too.
        kept = self._kept.union({v for _, parts in stages for part in parts for v in part.given}.intersection(
            each.source for each in self._exchanges))
        owners = self._owners(shares_of_update if by_nccl else divided.shares if divided else ())
        planned_stages, last = self._with_exchanges(stages, owners, by_nccl)
        broadcasts = self._broadcasts(shares_of_update) if by_nccl else []
        return StepPlan(self._options.name, self._program, self._mesh, self._machine, shares, tuple(planned_stages),
                        last, tuple(update), tuple(self._results), self._rows, frozenset(kept), tuple(self._params),
                        divided, tuple(broadcasts), overlaps, seconds, tuple(self._choices))

    # --- choices

    def _choose(self, what: str, chosen: str, reason: str) -> None:
        self._choices.append(Choice(what, chosen, reason))

    def _choose_shares(self, shares: Shares) -> None:
        """Note how samples are divided among the replicas."""
        if shares.n_replicas > 1:
            flag = self._options.flags.shares
            self._choose('shares', ':'.join(map(str, shares.weights)) or 'equal', 'mgpu.shares=' + flag
                         if shares.weights else against_speeds(self._options.flags, self._mesh, self._machine) or
                         'mgpu.shares=auto: equal until a difference of 15 % is measured')

    def _nccl_seconds(self, n_bytes: float) -> float:
        """Return how long devices exchange gradients by NCCL, if these are enough for several buckets; else 0."""
        machine = self._machine
        return 0 if machine.against_nccl or not machine.rate or n_bytes < 2 * LEAST else n_bytes / machine.rate

    def _overlaps(self, nccl_seconds: float) -> bool:
        """Return whether gradients of one bucket are exchanged while the next one is computed."""
        machine, recompute, took = self._machine, self._options.recomputes, self._options.strategy.exchange
        if not self._params or machine.size * len(self._mesh.replicas) == 1:
            return False
        on = [rank for rank, overlaps in enumerate(machine.overlap) if overlaps is True]
        overlaps = len(on) == machine.size and not recompute and not self._logical_shards
        reason = 'mgpu.overlap=%s' % (not took and len(on) == machine.size or self._options.flags.overlap)
        if len(on) not in (0, machine.size):
            reason = 'mgpu.overlap=True on the ranks %s alone' % ', '.join(map(str, on))
        elif took:
            reason += ': it took %d %% of a step, which it now may hide' % took
        elif nccl_seconds and set(machine.overlap) == {AUTO} and not recompute:
            reason += ': it takes %.3g ms at %.3g GB/s, and the times of the first steps decide' % (
                1e3 * nccl_seconds, machine.rate / 1e9)
        reason = 'mgpu.logical_shards' if self._logical_shards else 'recompute=True' if on and recompute else reason
        self._choose('exchange', 'while the next gradients are computed' if overlaps else 'once all are computed',
                     reason)
        return overlaps

    def _by_nccl(self, n_replicas: int) -> bool:
        """Return whether devices exchange sums by NCCL."""
        if n_replicas == 1 or all(context.kind != 'cuda' for context in self._mesh.contexts):
            return False
        reason, by_tree = self._machine.against_nccl, self._logical_shards > 0
        self._choose('collectives', 'the host' if reason else 'NCCL' + ' by blocks' * by_tree, reason or
                     'each replica is on a CUDA device of its own' + ', and adds in the order of the tree' * by_tree)
        return not reason

    def _where(self) -> str:
        """Return where the new values that replicas need are made."""
        wanted = self._machine.update_on
        where = min(wanted, key=UPDATE_ON.index)  # an order on which all ranks agree
        if where == 'host' and self._is_for_cores():
            self._choose('update', 'each parameter on one of the contexts', 'processes of contexts can update %d MB '
                         'at the same time' % (bytes_of_all(self._new) >> 20))
            return 'sharded'
        if self._new:
            self._choose('update', {'device': 'on each context', 'sharded': 'each parameter on one of the contexts',
                                    'host': 'on the host'}[where],
                         self._options.updates_on(self._mesh.contexts)[1] if len(set(wanted)) == 1 else
                         'the ranks would choose %s' % ', '.join(wanted))
        return where

    def _is_for_cores(self) -> bool:
        """Return whether each of several contexts of the CPU updates a share of large values, from sums of its own."""
        n, is_one_process = self._machine.n_replicas, self._machine.size == len(self._mesh.places) == 1
        if self._options.update_on != AUTO or self._mesh.on_devices or n == 1 or not is_one_process or \
                bytes_of_all(self._new) < LARGE:
            return False
        _, shares = update_shares(list(self._new), self._new, n)
        return all(len(reading) < 2 for reading in self._readers(shares).values())

    # --- stages

    def _parts_of(self, i: int, stage: Stage, in_buckets: Sequence[Sequence[theano.Variable]]) -> list[Part]:
        name, n = self._options.name, len(self._program.stages)
        if n > 1:
            name = '%s, stage %d of %d' % (name or 'a function', i + 1, n)
        exchanged = [each.variable for earlier in self._program.stages[:i + 1] for each in earlier.exchanges]
        pieces = cut(self._given + exchanged + list(stage.saved), stage.outputs, self._places.among(stage.saved),
                     self._options.recomputes, in_buckets)
        parts: list[Part] = []
        read = self._kept.union(each.source for each in self._exchanges)  # after the piece
        for piece in reversed(pieces):
            parts.insert(0, self._part_of(piece, read, name))
            read.update(piece.given)
        return parts

    def _part_of(self, piece: Piece, read: Collection[theano.Variable], name: str | None) -> Part:
        """Return the part of a piece; later pieces and stages `read` some of its values."""
        graphs = by_depth(dict(zip(piece.outputs, piece.graphs)))
        updates = {variable: graphs[new] for variable, new in self._alike.items() if new in graphs}
        outputs = [variable for variable in graphs if variable in read]
        return Part(tuple(piece.given), tuple(piece.stand_ins), tuple(outputs), tuple(graphs[v] for v in outputs),
                    updates, tuple(self._mesh.column(piece.place)), name, piece.level)

    # --- the update

    def _update(self, where: str) -> tuple[list[Part], list[list[SharedVariable]]]:
        """Plan the graphs of exchanged values: new values and results, on the host and on the contexts.

        Return the parts, and for each replica of all ranks the variables that it alone updates.
        """
        exchanged = {exchange.variable for exchange in self._exchanges}
        results = list(dict.fromkeys(output.variable for output in self._results
                                     if output.reduction is None and output.variable not in exchanged))
        here, light = self._on_host(results) if where != 'host' else (list(self._new), results)
        update = [self._update_part([v for v in results if v in light], here, [HOST], self._mesh.contexts)]
        heavy = [v for v in results if v not in light]
        of_replicas: list[list[SharedVariable]] = [[] for _ in range(self._machine.n_replicas)]
        first = sum(self._machine.replicas[:self._machine.rank])
        for place in self._mesh.places:
            there = [v for v in self._new if v not in here and self._places.of(v) == place]
            contexts, shares = self._mesh.column(place), []
            if where == 'sharded':
                there, every_share = update_shares(there, self._new, self._machine.n_replicas)
                of_replicas = [before + share for before, share in zip(of_replicas, every_share)]
                shares = every_share[first:first + len(contexts)]
            update.append(self._update_part(heavy, there, contexts if there else contexts[:1]))
            update += [self._update_part([], share, [context], contexts, is_share=True)
                       for share, context in zip(shares, contexts)]
            heavy = []
        return [part for part in update if part.outputs or part.updates], of_replicas

    def _on_host(self, results: list[theano.Variable]) -> tuple[list[SharedVariable], list[theano.Variable]]:
        """Return the variables that are updated on the host, and the results that are computed there."""
        new, idle = self._new, self._not_read_by_replicas()
        light = [v for v in results + list(new.values()) if shared_ancestors([v]) <= idle]
        here = [v for v in new if v in idle and new[v] in light or self._places.of(v) == CPU]
        # The host has all variables; a device would need copies of the variables of other devices.
        light += [v for v in results if v not in light and len(set(map(self._places.of, shared_ancestors([v])))) > 1]
        return here, light

    def _not_read_by_replicas(self) -> set[SharedVariable]:
        """Return the variables that no replica needs: no stage reads them, nor the new value of another one."""
        idle = {v for v in self._new if not is_random_state(v)} - shared_ancestors(self._program.in_stages)
        while True:
            needed = idle & shared_ancestors([value for variable, value in self._new.items() if variable not in idle])
            if not needed:
                return idle
            idle -= needed

    def _divided(self, of_replicas: list[list[SharedVariable]]) -> ShardedUpdate | None:
        if self._machine.size == 1 or not any(of_replicas):
            return None
        of_ranks = [sum(of_replicas[first:end], []) for first, end in ranges(self._machine.replicas)]
        updated = sum(of_ranks, [])
        sent = self._read_by_every_replica(of_ranks).intersection(updated)
        return ShardedUpdate(tuple(map(tuple, of_ranks)), frozenset(sent),
                             tuple(shared_variables([self._new[variable] for variable in updated] + updated)))

    def _broadcasts(self, of_replicas: list[list[SharedVariable]]) -> Iterable[DeviceBroadcast]:
        """Yield the new values of a sharded update that devices send each other."""
        sent = self._read_by_every_replica(of_replicas)
        for place in self._mesh.places:
            contexts = self._mesh.column(place)
            owners = {variable: replica for replica, share in enumerate(of_replicas) for variable in share
                      if variable in sent and fits_gpu(variable) and self._places.of(variable) == place}
            if owners and all(context.kind == 'cuda' for context in contexts):
                yield DeviceBroadcast(tuple(contexts), owners)

    def _read_by_every_replica(self, shares: Iterable[Iterable[SharedVariable]]) -> set[theano.Variable]:
        """Return the ancestors of the stages, the results and the undivided part of an update."""
        divided = {variable for share in shares for variable in share}
        return set(ancestors([*self._program.in_stages, *[output.variable for output in self._results],
                              *[value for variable, value in self._new.items() if variable not in divided]]))

    def _update_part(self, outputs: Sequence[theano.Variable], updated: Sequence[SharedVariable],
                     contexts: Sequence[Context], copied_to: Sequence[Context] = (), is_share: bool = False) -> Part:
        updates = {variable: self._new[variable] for variable in updated}
        reads = set(ancestors([*outputs, *updates.values()]))
        every_given = self._given + [exchange.variable for exchange in self._exchanges]
        given = tuple(variable for variable in dict.fromkeys(every_given) if variable in reads)
        return Part(given, given, tuple(outputs), tuple(outputs), updates, tuple(contexts), self._options.name,
                    copied_to=tuple(copied_to), is_share=is_share)

    # --- exchanges

    def _owners(self, shares: Sequence[Sequence[SharedVariable]]) -> dict[theano.Variable, int]:
        """Return the share of a sharded update that reads a sum, for sums of arrays that one alone reads."""
        if not any(shares):
            return {}
        by_all = self._read_by_every_replica(shares)
        return {variable: reading[0] for variable, reading in self._readers(shares).items()
                if len(reading) == 1 and variable not in by_all}

    def _readers(self, shares: Sequence[Sequence[SharedVariable]]) -> dict[theano.Variable, list[int]]:
        """Return the numbers of the shares of an update that read each exchanged array."""
        read = [set(ancestors([self._new[variable] for variable in share])) for share in shares]
        return {each.variable: [i for i, of_share in enumerate(read) if each.variable in of_share]
                for each in self._exchanges if n_axes(each.variable)}

    def _with_exchanges(self, stages: Sequence[tuple[Stage, list[Part]]], owners: Mapping[theano.Variable, int],
                        by_nccl: bool) -> tuple[list[StagePlan], Boundary]:
        """Return the stages with the exchanges before each, and the exchanges after the last one.

        The `owners` of sums that one alone reads are replicas where devices add, else ranks.
        """
        in_tree = self._logical_shards > 0
        sums: dict[Part, list[SumGroup]] = {part: [] for _, parts in stages for part in parts}
        boundaries = []
        for exchanges in [stage.exchanges for stage, _ in stages] + [self._program.exchanges]:
            additive = [each for each in exchanges
                        if each.reduction == SUM and each.source.dtype.startswith('float')]
            groups: list[SumGroup] = []
            for part, of_part in sums.items():
                on_devices = by_nccl and all(context.kind == 'cuda' for context in part.contexts)
                new = list(_groups([each for each in additive if each.source in part.outputs], owners, by_nccl,
                                   on_devices, in_tree))
                of_part += new
                groups += new
            boundaries.append(Boundary(tuple(exchanges), tuple(groups),
                                       tuple(each for each in exchanges if each not in additive)))
        return [StagePlan(boundary, stage.saved, tuple(replace(part, sums=tuple(sums[part])) for part in parts),
                          stage.once)
                for boundary, (stage, parts) in zip(boundaries, stages)], boundaries[-1]


def _groups(exchanges: Sequence[Exchange], owners: Mapping[theano.Variable, int], by_nccl: bool, on_devices: bool,
            in_tree: bool) -> Iterable[SumGroup]:
    """Yield the sums that are exchanged together, in one way."""
    # A rank that adds its sums in one piece has them next to each other.
    owned = [] if by_nccl else sorted([each for each in exchanges if each.variable in owners],
                                      key=lambda each: owners[each.variable])
    others = [each for each in exchanges if each not in owned]
    of_devices = [each for each in others if on_devices and fits_gpu(each.source) and each.source.dtype in OF_NCCL]
    others = [each for each in others if each not in of_devices]
    for some, way in ((of_devices, ExchangeWay(in_tree, tuple(owners.get(each.variable) for each in of_devices), True)),
                      (others, ExchangeWay(in_tree)),
                      (owned, ExchangeWay(in_tree, tuple(owners[each.variable] for each in owned)))):
        if some:
            yield SumGroup(tuple(some), way)


def tree_text(n_shards: int, longest: int = 16) -> str:
    """Return the order in which logical shards are added, for people.

    Examples
    --------
    >>> tree_text(5), tree_text(64)
    ('((1 + 2) + (3 + 4)) + 5', '64, added two by two')
    """
    if n_shards > longest:
        return '%d, added two by two' % n_shards
    text = Tree(0, (n_shards,)).reduced([str(i + 1) for i in range(n_shards)], '({} + {})'.format)
    return text[1:-1] if n_shards > 1 else text


def update_shares(variables: Sequence[SharedVariable], new: Mapping[SharedVariable, theano.Variable],
                  n: int) -> tuple[list[SharedVariable], list[list[SharedVariable]]]:
    """Divide variables among n devices, in their order, with about as many bytes for each.

    Each device computes the new values of a share of the parameters, with their state. Variables stay together if the
    new value of one reads the other, such as a parameter and its state in the optimizer. Return the scalars, such as
    the number of steps, which each device computes, and n shares. A share may be empty.

    This is the first stage of ZeRO (Rajbhandari et al., 2020), with whole parameters in place of slices.
    """
    common = [variable for variable in variables if not n_axes(variable)]
    group_of = {variable: [variable] for variable in variables if variable not in common}
    for variable in list(group_of):
        for other in ancestors([new[variable]]):
            group, others = group_of[variable], group_of.get(other)
            if others is not None and others is not group:
                group += others
                group_of.update((each, group) for each in others)
    groups = list({id(group): group for group in group_of.values()}.values())
    shares: list[list[SharedVariable]] = [[] for _ in range(n)]
    for group, number in zip(groups, parts_by_bytes(list(map(bytes_of_all, groups)), n)):
        shares[number] += group
    return common, shares
