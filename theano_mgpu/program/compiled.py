"""The graphs of a program, compiled for contexts."""
from collections import namedtuple
from typing import Any, List, Optional, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..devices.context_map import Context
from ..distributed.process_group import Ranks
from ..replicas.random_streams import is_random_state
from .parallel_graph import HOST, ParallelGraph
from .partition import OWN, Program

Part = namedtuple('Part', 'given outputs updated graph')
Part.__doc__ = """A graph of a program: what it is `given`, variables; its `outputs`; the shared variables that are
`updated`, whose new values follow the outputs; and the ParallelGraph."""


class CompiledProgram:
    """The stages of a program, and what is computed of exchanged values: new values of parameters, most of all.

    Parameters
    ----------
    program : Program
    inputs : list of theano.Variable
        Of a call: those of the program, and others that every replica gets whole.
    updated : list of SharedVariable
        What the last of the program's outputs are new values of.
    update_on : {'device', 'host'}
        Where the new values that replicas need are made: on each context, or once on the host. Others, such as
        metrics and running averages, are made on the host.
    contexts : list of Context
    ranks : Ranks
    mode, name
        As for `theano.function`.

    Attributes
    ----------
    results : list of Output
        Those of the program that are not new values.
    rows : dict of SharedVariable to Output
        New values with a row a sample.
    stages : list of (Stage, Part)
    parts : list of Part
        What is computed after the last exchange.
    """

    def __init__(self, program: Program, inputs: Sequence[theano.Variable], updated: Sequence[SharedVariable],
                 update_on: str, contexts: List[Context], ranks: Ranks, mode: Any = None,
                 name: Optional[str] = None):
        self.program, self.contexts = program, contexts
        self._ranks, self._mode = ranks, mode
        n_results = len(program.outputs) - len(updated)
        self.results = program.outputs[:n_results]
        new = dict(zip(updated, program.outputs[n_results:]))
        self.rows = {variable: output for variable, output in new.items() if isinstance(output.how, tuple)}
        own = {variable: output.variable for variable, output in new.items() if output.how == OWN}
        self.exchanges = [exchange for stage in program.stages for exchange in stage.exchanges] + program.exchanges
        # What a shard has to keep, beside what it only gives to sums.
        self.kept = {source for stage in program.stages for source in stage.carried.values()}
        self.kept.update(output.variable for output in self.results + list(self.rows.values()))
        given = list(inputs) + program.numbers
        self.stages = [(stage, self._stage(i, stage, given, own, name)) for i, stage in enumerate(program.stages)
                       if stage.outputs]
        rest = {variable: output.variable for variable, output in new.items() if output.how is None}
        self.parts = self._parts(given, rest, update_on, name)

    @property
    def graphs(self) -> List[ParallelGraph]:
        return [part.graph for _, part in self.stages] + [part.graph for part in self.parts]

    def _stage(self, i, stage, given, own, name):
        updates = {variable: new for variable, new in own.items() if new in stage.outputs}
        needed = self.kept.union(exchange.source for exchange in self.exchanges)
        outputs = [variable for variable in stage.outputs if variable in needed]
        known = [exchange.variable for each in self.program.stages[:i + 1] for exchange in each.exchanges]
        n = len(self.program.stages)
        return self._part(given + known + list(stage.carried), outputs, updates, self.contexts,
                          name if n == 1 else '%s, stage %d of %d' % (name or 'a function', i + 1, n))

    def _for_the_host(self, new):
        """Those of the variables that no replica needs: no stage reads them, nor the new value of another one."""
        found = {v for v in new if not is_random_state(v)}
        found -= _reads(*[variable for stage in self.program.stages for variable in stage.outputs])
        while True:
            needed = found & _reads(*[value for variable, value in new.items() if variable not in found])
            if not needed:
                return found
            found -= needed

    def _parts(self, given, new, update_on, name):
        """Parts on the host, and on the contexts, that make new values and results."""
        exchanged = [exchange.variable for exchange in self.exchanges]
        results = [output.variable for output in self.results if output.how is None]
        results = [variable for variable in dict.fromkeys(results) if variable not in exchanged]
        on_host = self._for_the_host(new)
        light = [v for v in results + list(new.values()) if _reads(v) <= on_host]
        here = [v for v in new if v in on_host and new[v] in light]
        if update_on == 'host':
            here, light = list(new), results
        there = [v for v in new if v not in here]
        found = []
        for contexts, outputs, variables in (
                ([HOST], [v for v in results if v in light], here),
                (self.contexts if there else self.contexts[:1], [v for v in results if v not in light], there)):
            if outputs or variables:
                found.append(self._part(given + exchanged, outputs, {v: new[v] for v in variables}, contexts, name))
        return found

    def _part(self, given, outputs, updates, contexts, name):
        reads = set(ancestors(outputs + list(updates.values())))
        given = [variable for variable in dict.fromkeys(given) if variable in reads]
        graph = ParallelGraph(given, outputs, updates, contexts, self._ranks, self.program, self._mode, name)
        return Part(given, outputs, list(updates), graph)


def _reads(*variables):
    return {v for v in ancestors(variables) if hasattr(v, 'container')}
