"""The graphs of a program, compiled for contexts."""
from collections import namedtuple
from typing import Any, Dict, List, Sequence, Set

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..devices.context_map import HOST, Context
from ..devices.mesh import CPU, Mesh
from ..distributed.process_group import Ranks
from ..graphs.output_order import by_depth
from ..replicas.random_streams import is_random_state
from .buckets import buckets, bytes_of_gradients
from .parallel_graph import ParallelGraph
from .partition import OWN, Program
from .pieces import Places, cut
from .update_shares import update_shares

Part = namedtuple('Part', 'given outputs updated graph level last copied_to', defaults=[0, (), ()])
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
    ranks : Ranks
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
    in_half : set of theano.Variable
        What stands for the sums that ranks exchange as float16, if the flag ``mgpu.exchange`` says so: arrays that the
        new values of trained parameters depend on.
    """

    def __init__(self, program: Program, inputs: Sequence[theano.Variable], updated: Sequence[SharedVariable],
                 update_on: str, mesh: Mesh, placement: Dict[SharedVariable, str], ranks: Ranks, options: Any):
        self.program, self.mesh = program, mesh
        self._places, self._ranks, self._options = Places(mesh, placement), ranks, options
        self.overlaps = bool(options.params and not options.recompute and ranks.size * len(mesh.replicas) > 1
                             and self._all_ranks('overlap', 'True'))
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
        self.parts = self._parts(given, rest, update_on)
        self.in_half = set()
        if options.params and self._all_ranks('exchange', 'float16'):
            made = ancestors([rest[param] for param in options.params if param in rest])
            last = {exchange.variable for exchange in program.exchanges if exchange.variable.ndim}
            self.in_half = last.intersection(made)

    def _all_ranks(self, flag, value):
        """Whether a flag of the package has a value on every rank."""
        return all(self._ranks.everyones(getattr(theano.config.mgpu, flag) == value))

    @property
    def graphs(self) -> List[ParallelGraph]:
        return [part.graph for part in self._all_parts()]

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
                     self._options.recompute, buckets(stage.outputs, self._sizes))
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
        graph = self._graph(piece.stand_ins, [graphs[v] for v in outputs], updates, self.mesh.column(piece.place), name)
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
                there, shares = update_shares(there, new, min(self._ranks.everyones(len(contexts))))
            found.append(self._part(given + exchanged, heavy, there, new, contexts if there else contexts[:1]))
            found += [self._part(given + exchanged, [], share, new, [context], contexts)
                      for share, context in zip(shares, contexts)]
            heavy = []
        return [part for part in found if part.outputs or part.updated]

    def _part(self, given, outputs, updated, new, contexts, copied_to=()):
        updates = {variable: new[variable] for variable in updated}
        reads = set(ancestors(outputs + list(updates.values())))
        given = [variable for variable in dict.fromkeys(given) if variable in reads]
        graph = self._graph(given, outputs, updates, contexts, self._options.name) if outputs or updates else None
        return Part(given, outputs, list(updates), graph, copied_to=copied_to)

    def _graph(self, inputs, outputs, updates, contexts, name):
        return ParallelGraph(inputs, outputs, updates, contexts, self._ranks, self.program, self._options.mode, name)


def _reads(*variables):
    return {v for v in ancestors(variables) if hasattr(v, 'container')}
