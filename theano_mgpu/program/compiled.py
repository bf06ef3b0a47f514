"""The graphs of a program, compiled for contexts."""
import functools
from collections import namedtuple
from typing import Any, Dict, List, Sequence, Set

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..devices.context_map import HOST, Context
from ..devices.mesh import CPU, Mesh
from ..distributed.alone import Alone
from ..distributed.collectives import all_gather_int
from ..distributed.communicator import Communicator
from ..graphs.graph import shared_variables
from ..graphs.output_order import by_depth
from ..replicas.random_streams import is_random_state
from ..replicas.replicated import Replicated, replicated
from .buckets import buckets, bytes_of_gradients
from .divided_update import DividedUpdate, shares_of_ranks
from .parallel_graph import ParallelGraph, check_same_graph, share_first_values
from .partition import OWN, Program
from .pieces import Places, cut
from .update_shares import update_shares

Part = namedtuple('Part', 'given outputs updated graph level last copied_to is_share', defaults=[0, (), (), False])
Part.__doc__ = """A graph of a program, compiled.

Attributes
----------
given, outputs : list of theano.Variable
    What it takes and what it makes.
updated : list of SharedVariable
    Those whose new values follow the outputs.
graph : ParallelGraph
level : int
    Of the pieces of a stage, see `pieces.Piece`.
last : list of theano.Variable
    Values that no later piece of the stage needs.
copied_to : list of Context
    Contexts that get the new values, if they have copies of the variables and have not computed them.
is_share : bool
    Whether other contexts, or processes, compute other parts of the same update.
"""


class CompiledProgram:
    """The stages of a program, and what is computed of exchanged values: new values of parameters, most of all.

    Parameters
    ----------
    program : Program
    inputs : list of theano.Variable
        Of a call: those of the program, and others that every replica gets whole.
    updated : list of SharedVariable
        What the last of the program's outputs are new values of.
    update_on : {'device', 'sharded', 'host'}
        Where the new values that replicas need are made: on each context, each on one of the contexts, or on the host.
        Others, such as metrics and running averages, are made on the host.
    mesh : Mesh
    placement : dict of SharedVariable to str
        The place of each; empty for a graph that is not placed.
    ranks : Communicator
    options : Options
        Its `mode`, `name` and `params`, and `recompute`, see `pieces.cut`.

    Attributes
    ----------
    results : list of Output
        Those of the program that are not new values.
    rows : dict of SharedVariable to Output
        New values with a row a sample.
    stages : list of (Stage, list of Part)
        For each stage its pieces, by level.
    parts : list of Part
        What is computed after the last exchange.
    overlaps : bool
        Whether stages are cut at buckets of gradients, each of which is exchanged while the next one is computed.
    divided : DividedUpdate or None
        If ranks divide the update.
    owners : dict of theano.Variable to int
        Of what stands for sums that only one rank reads, that rank.
    in_half : set of theano.Variable
        What stands for the sums that ranks exchange as float16, if the flag ``mgpu.exchange`` says so: arrays that the
        new values of trained parameters depend on.
    """

    def __init__(self, program: Program, inputs: Sequence[theano.Variable], updated: Sequence[SharedVariable],
                 update_on: str, mesh: Mesh, placement: Dict[SharedVariable, str], ranks: Communicator,
                 options: Any):
        self.program, self.mesh = program, mesh
        self._places, self._ranks, self._options = Places(mesh, placement), ranks, options
        self.overlaps = bool(options.params and not options.recompute and ranks.size * len(mesh.replicas) > 1
                             and self._all_ranks('overlap', 'True'))
        if self.overlaps:
            ranks.check_threads()
        n_results = len(program.outputs) - len(updated)
        self.results = program.outputs[:n_results]
        new = dict(zip(updated, program.outputs[n_results:]))
        self.rows = {variable: output for variable, output in new.items() if isinstance(output.how, tuple)}
        own = {variable: output.variable for variable, output in new.items() if output.how == OWN}
        self.exchanges = [exchange for stage in program.stages for exchange in stage.exchanges] + program.exchanges
        # What a shard has to keep, beside what it only gives to sums; `_stage` adds the sums that later pieces read.
        self.kept = {source for stage in program.stages for source in stage.carried.values()}
        self.kept.update(output.variable for output in self.results + list(self.rows.values()))
        given = list(inputs) + program.numbers
        rest = {variable: output.variable for variable, output in new.items() if output.how is None}
        self._sizes = bytes_of_gradients(self.exchanges, options.params, rest) if self.overlaps else {}
        self.stages = [(stage, self._stage(i, stage, given, own)) for i, stage in enumerate(program.stages)
                       if stage.outputs]
        self._shares_of_ranks, self._read_by_shares = [[] for _ in range(ranks.size)], []
        self.parts = self._parts(given, rest, update_on)
        self.divided, self.owners, self.in_half = None, {}, set()
        if any(self._shares_of_ranks):
            self._divide(rest)
        if options.params and self._all_ranks('exchange', 'float16'):
            made = ancestors([rest[param] for param in options.params if param in rest])
            last = {exchange.variable for exchange in program.exchanges if exchange.variable.ndim}
            self.in_half = last.intersection(made).difference(self.owners)

    def _divide(self, new):
        """Plan what ranks send each other of an update that they divide."""
        divided = sum(self._shares_of_ranks, [])
        others = [variable for stage in self.program.stages for variable in stage.outputs]
        others += [value for variable, value in new.items() if variable not in divided]
        others += [output.variable for output in self.results]
        others = set(ancestors(others))
        self.divided = DividedUpdate(self._ranks, self._shares_of_ranks, others)
        read = [set(ancestors([new[variable] for variable in share])) for share in self._shares_of_ranks]
        for variable in (exchange.variable for exchange in self.exchanges):
            ranks = [rank for rank, variables in enumerate(read) if variable in variables]
            if len(ranks) == 1 and variable.ndim and variable not in others:
                self.owners[variable], = ranks

    def over_ranks(self, variable: theano.Variable) -> str:
        """How ranks add what a variable stands for: 'all' or 'half', see `Sums`, or 'owner'."""
        return 'owner' if variable in self.owners else 'half' if variable in self.in_half else 'all'

    def _all_ranks(self, flag, value):
        """Whether a flag of the package has a value on every rank."""
        return all(all_gather_int(self._ranks, getattr(theano.config.mgpu, flag) == value))

    @property
    def graphs(self) -> List[ParallelGraph]:
        return [part.graph for part in self._all_parts()]

    @functools.cached_property
    def variables(self) -> List[Replicated]:
        """What the graphs read, and those that other ranks compute; each once, and the same on all ranks."""
        found = [v for part in self._all_parts() if not part.is_share for v in part.graph.variables]
        found += self._read_by_shares + [v for graph in self.graphs for v in graph.variables]
        return list(dict.fromkeys(found))

    def refresh(self) -> None:
        """Copy values of the user's variables to replicas that are out of date."""
        for variable in self.variables:  # of all parts, since another function may have divided some of them otherwise
            if variable.divided and (self.divided is None or variable.divided != self.divided.gather):
                variable.divided()
            if variable.lent:
                variable.note_edits()
        for part in self._all_parts():
            part.graph.refresh(part.is_share)

    def _all_parts(self):
        return [part for _, parts in self.stages for part in parts] + self.parts

    def read_on(self) -> Dict[Context, Set[theano.Variable]]:
        """What the parts on each context are given."""
        found = {context: set() for context in self.mesh.contexts + [HOST]}
        for part in self._all_parts():
            for context in part.graph.contexts:
                found[context].update(part.given)
        return found

    def _stage(self, i, stage, given, own):
        """The pieces of a stage, compiled."""
        name, n = self._options.name, len(self.program.stages)
        if n > 1:
            name = '%s, stage %d of %d' % (name or 'a function', i + 1, n)
        known = [exchange.variable for each in self.program.stages[:i + 1] for exchange in each.exchanges]
        pieces = cut(given + known + list(stage.carried), stage.outputs, self._places.among(stage.carried),
                     self._options.recompute, buckets(stage.outputs, self._sizes) if self.overlaps else ())
        kept = self.kept.union(exchange.source for exchange in self.exchanges)
        parts, later = [], set()
        for piece in reversed(pieces):
            parts.insert(0, self._piece(piece, own, kept, later, name))
            later.update(piece.given)
        self.kept.update(exchange.source for exchange in self.exchanges if exchange.source in later)
        return parts

    def _piece(self, piece, own, kept, later, name):
        """A piece, compiled; `kept` is what is needed after the stage, `later` what later pieces are given."""
        graphs = by_depth(dict(zip(piece.outputs, piece.graphs)))
        updates = {variable: graphs[new] for variable, new in own.items() if new in graphs}
        outputs = [variable for variable in graphs if variable in kept or variable in later]
        graph = self._graph(piece.stand_ins, [graphs[v] for v in outputs], updates, self.mesh.column(piece.place), name,
                            self._ranks)
        last = [v for v in piece.given if v.owner is not None and v not in kept and v not in later]
        return Part(piece.given, outputs, list(updates), graph, piece.level, last)

    def _for_the_host(self, new):
        """Those of the variables that no replica needs: no stage reads them, nor the new value of another one."""
        found = {v for v in new if not is_random_state(v)}
        found -= _reads(*[variable for stage in self.program.stages for variable in stage.outputs])
        while True:
            needed = found & _reads(*[value for variable, value in new.items() if variable not in found])
            if not needed:
                return found
            found -= needed

    def _parts(self, given, new, update_on):
        """Parts on the host, and on the contexts, that make new values and results."""
        exchanged = [exchange.variable for exchange in self.exchanges]
        results = [output.variable for output in self.results if output.how is None]
        results = [variable for variable in dict.fromkeys(results) if variable not in exchanged]
        on_host = self._for_the_host(new)
        light = [v for v in results + list(new.values()) if _reads(v) <= on_host]
        here = [v for v in new if v in on_host and new[v] in light or self._places.of(v) == CPU]
        # The host has all variables; a device would get a copy of those of the others.
        light += [v for v in results if v not in light and len({self._places.of(each) for each in _reads(v)}) > 1]
        if update_on == 'host':
            here, light = list(new), results
        found = [self._part(given + exchanged, [v for v in results if v in light], here, new, [HOST],
                            self.mesh.contexts)]
        heavy = [v for v in results if v not in light]
        for place in self.mesh.places:
            there = [v for v in new if v not in here and self._places.of(v) == place]
            contexts = self.mesh.column(place)
            shares = []
            if update_on == 'sharded':
                there, shares = self._shares(there, new, contexts)
            found.append(self._part(given + exchanged, heavy, there, new, contexts if there else contexts[:1]))
            found += [self._part(given + exchanged, [], share, new, [context], contexts, is_share=True)
                      for share, context in zip(shares, contexts)]
            heavy = []
        return [part for part in found if part.outputs or part.updated]

    def _shares(self, variables, new, contexts):
        """Variables that each context computes new values of, and those of each of this process's contexts."""
        counts = all_gather_int(self._ranks, len(contexts))
        common, shares = update_shares(variables, new, sum(counts))
        of_ranks = shares_of_ranks(shares, counts)
        if self._ranks.size > 1:
            self._check_update(variables, new)
            for all_of_rank, some in zip(self._shares_of_ranks, of_ranks):
                all_of_rank += sum(some, [])
        return common, of_ranks[self._ranks.rank]

    def _check_update(self, updated, new):
        """Have ranks that compile different parts of an update compare the whole, and share first values."""
        values = [new[variable] for variable in updated]
        inputs = [v for v in dict.fromkeys(ancestors(values)) if v.owner is None and not hasattr(v, 'container')
                  and not isinstance(v, theano.Constant)]
        read = shared_variables(values + updated)
        check_same_graph(self._ranks, inputs, values, read, len(self.mesh.contexts))
        self._read_by_shares += [replicated(variable) for variable in read]
        share_first_values(self._ranks, self._read_by_shares)

    def _part(self, given, outputs, updated, new, contexts, copied_to=(), is_share=False):
        updates = {variable: new[variable] for variable in updated}
        reads = set(ancestors(outputs + list(updates.values())))
        given = [variable for variable in dict.fromkeys(given) if variable in reads]
        graph = None
        if outputs or updates:
            ranks = Alone() if is_share else self._ranks  # other ranks compile other shares
            graph = self._graph(given, outputs, updates, contexts, self._options.name, ranks)
        return Part(given, outputs, list(updates), graph, copied_to=copied_to, is_share=is_share)

    def _graph(self, inputs, outputs, updates, contexts, name, ranks):
        return ParallelGraph(inputs, outputs, updates, contexts, ranks, self.program, self._options.mode, name)


def _reads(*variables):
    return {v for v in ancestors(variables) if hasattr(v, 'container')}
