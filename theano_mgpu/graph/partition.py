"""The partition of a graph into stages: a replica computes a stage without values from another replica."""
from __future__ import annotations

import functools
from typing import Collection, Iterable, Mapping, NamedTuple, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import Apply, ancestors, io_toposort
from theano.ifelse import IfElse
from theano.scalar import Switch
from theano.tensor.basic import AllocEmpty

from .analysis import CONSTANT, PARTIAL, ROWS, SAME, Gather, Reduction, Shards
from .analysis.known import is_scalar_op, number, number_everywhere
from .analysis.rules.batch_norm import TRAINING, elementary
from .analysis.touched_rows import most_bytes_of_rows
from .random_streams import DRAWS
from .rewrites import inlined, merged, rebuilt, substitute
from .saved_values import SavedValues


class Exchange(NamedTuple):
    """A value that replicas exchange: its placeholder, each one's contribution, and how these are reduced."""

    variable: theano.Variable
    source: theano.Variable
    reduction: Reduction


class Stage(NamedTuple):
    """A stage: first the exchanges, then the graph of `outputs`, computed by each replica.

    `saved` maps each placeholder of a value of an earlier stage to that value. A stage that is `once` has values of the
    whole batch: the first shard of each replica computes it, for all its shards.
    """

    exchanges: list[Exchange]
    saved: dict[theano.Variable, theano.Variable]
    outputs: list[theano.Variable]
    once: bool = False


class Output(NamedTuple):
    """An output of a program.

    `reduction` is a Gather for rows that a stage computes, `SAME` for a value that a stage computes alike on each
    replica, and None for a graph of exchanged values and constants, which needs no replica.
    """

    variable: theano.Variable
    reduction: Reduction | None

    @property
    def has_rows(self) -> bool:
        """Return whether the output has rows of single samples."""
        return isinstance(self.reduction, Gather)


class Program(NamedTuple):
    """The stages and exchanges of a graph over a batch, for replicas.

    Attributes
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0.
    numbers : list of theano.Variable
        Samples of the whole batch, samples of the replica, number of its first sample; and where each process has data
        of its own, number of the first sample of the process.
    exchanges : list of Exchange
        After the last stage.
    outputs : list of Output
        In the order of the graph's.
    own : collection of SharedVariable
        Data sets of which each process has its own part.
    given : list of theano.Variable
        Inputs of a call: those with samples, and those that every replica gets whole.
    updated : list of SharedVariable
        The last of the outputs are their new values.
    whole : str
        Why each replica computes some op whole, of the samples of all; empty where none does.
    n_whole : int
        Costly ops, such as products, that have no samples to divide.
    tables : dict of SharedVariable to int
        Those whose gradients are exchanged by rows where these are fewer bytes; at most as many.
    """

    inputs: list[theano.Variable]
    numbers: list[theano.Variable]
    stages: list[Stage]
    exchanges: list[Exchange]
    outputs: list[Output]
    own: Collection[SharedVariable] = ()
    given: Sequence[theano.Variable] = ()
    updated: Sequence[SharedVariable] = ()
    whole: str = ''
    n_whole: int = 0
    tables: Mapping[SharedVariable, int] = {}

    @property
    def is_divided(self) -> bool:
        """Return whether replicas compute the program in parts; else one replica computes it as it is."""
        return bool(self.numbers)

    @property
    def in_stages(self) -> list[theano.Variable]:
        """The outputs of all stages."""
        return [variable for stage in self.stages for variable in stage.outputs]

    @property
    def every_exchange(self) -> list[Exchange]:
        """The exchanges before each stage, and after the last one."""
        return [each for stage in self.stages for each in stage.exchanges] + list(self.exchanges)

    def renamed(self, new: Mapping[theano.Variable, theano.Variable]) -> Program:
        """Return the program with other variables in place of the outputs of stages."""
        def exchanges(each: Iterable[Exchange]) -> list[Exchange]:
            return [exchange._replace(source=new.get(exchange.source, exchange.source)) for exchange in each]
        stages = [Stage(exchanges(stage.exchanges), {v: new.get(source, source) for v, source in stage.saved.items()},
                        [new.get(output, output) for output in stage.outputs], stage.once) for stage in self.stages]
        return self._replace(stages=stages, exchanges=exchanges(self.exchanges), outputs=[
            output._replace(variable=new.get(output.variable, output.variable)) for output in self.outputs])


def undivided(outputs: Sequence[theano.Variable]) -> Program:
    """Return the Program of a graph that one replica computes as it is, with the whole batch."""
    return Program([], [], [Stage([], {}, list(dict.fromkeys(outputs)))], [],
                   [Output(output, SAME) for output in outputs])


def expressed(program: Program, expressions: Mapping[theano.Variable, theano.Variable]) -> Program:
    """Return a program in which replicas compute some of the inputs.

    The expressions are functions of values that every replica has, and of the program's `numbers`.
    """
    sources = program.in_stages
    return program.renamed(dict(zip(sources, substitute(sources, expressions))))._replace(
        inputs=[variable for variable in program.inputs if variable not in expressions])


def drawn_once(program: Program) -> Program:
    """Return a program with a first stage that draws the numbers of the whole batch, where the program draws any.

    Further functions of these numbers, such as the mask of a dropout, belong to this stage, too, as long as no value of
    a shard takes part. Without the stage, each shard of a replica draws all numbers, and uses its own.
    """
    sources = program.in_stages
    late = {each.variable for each in program.every_exchange}  # and later, all that is made of these
    late.update(placeholder for stage in program.stages for placeholder in stage.saved)
    of_shard = {*program.inputs, *program.numbers[1:], *late}
    drawn: set[theano.Variable] = set()
    nodes = io_toposort([], sources)
    for node in nodes:
        # The shape of a draw is the shape of the whole batch, although the graph makes it of the shape of a shard.
        is_draw = isinstance(node.op, DRAWS)
        if late.intersection(node.inputs):
            late.update(node.outputs)
            of_shard.update(node.outputs)
        elif is_draw or drawn.intersection(node.inputs) and not of_shard.intersection(node.inputs):
            drawn.update(node.outputs)
        elif of_shard.intersection(node.inputs):
            of_shard.update(node.outputs)
    read = {variable for node in nodes if of_shard.intersection(node.outputs) for variable in node.inputs}
    first = [variable for node in nodes for variable in node.outputs
             if variable in drawn and (variable in read or variable in sources)]
    if not first:
        return program
    placeholders = {variable: variable.type(variable.name) for variable in first}
    others = [variable for variable in sources if variable not in first]
    program = program.renamed(dict(zip(others, substitute(others, placeholders))))
    stages = [Stage([], {}, first, once=True)]
    for stage in program.stages:
        outputs = [variable for variable in stage.outputs if variable not in first]
        leaves = set(ancestors(outputs))
        saved = {placeholder: variable for variable, placeholder in placeholders.items() if placeholder in leaves}
        stages.append(stage._replace(outputs=outputs, saved={**stage.saved, **saved}))
    return program._replace(stages=stages)


def partition(inputs: list[theano.Variable], outputs: Sequence[theano.Variable], by_rows: bool = True) -> Program:
    """Cut a graph where samples meet.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0; everything else that the graph reads is the same on every replica.
    outputs : list of theano.Variable
        Of host variables, not yet optimised.
    by_rows : bool
        Whether the rows that samples touch may be exchanged in place of a table. Processes with samples of their own,
        which may have other lengths, would choose differently.

    Raises
    ------
    CannotCut
        If the graph cannot be computed exactly from shards.

    Notes
    -----
    As GSPMD (Xu et al., 2021) has it, a dimension that is sharded and summed over leaves partial sums, and these
    become an all-reduce; here a stage ends there.
    """
    outputs = lowered(outputs)
    of_graph = set(ancestors(outputs))
    exchanged: set[theano.Variable] = set()
    while True:
        shards = Shards(inputs, outputs, exchanged, by_rows=by_rows)
        twice = shards.exchanged_twice() & of_graph - exchanged
        if not twice:
            return _program(shards, inputs)
        exchanged |= twice


def lowered(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Return a copy of a graph in which the training of batch normalisation is simpler ops, and no node stands twice.

    The graph inside of an OpFromGraph stands in its place. A branch whose condition is a known number is gone.
    """
    return merged(rebuilt(inlined(outputs), _simpler))


def _simpler(node: Apply, inputs: list[theano.Variable]) -> list[theano.Variable] | None:
    if isinstance(node.op, IfElse):
        return _branch(node, inputs)
    if isinstance(node.op, TRAINING):
        return elementary(node, inputs)
    return None


def chosen_branches(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Return a copy of a graph without branches that are never taken, since the condition is a known number."""
    return rebuilt(outputs, _branch)


def _branch(node: Apply, inputs: list[theano.Variable]) -> list[theano.Variable] | None:
    n = len(node.outputs)
    if isinstance(node.op, IfElse) and number(inputs[0]) is not None:  # as Keras's learning phase may be
        return inputs[1:n + 1] if number(inputs[0]) else inputs[n + 1:]
    if is_scalar_op(node, Switch) and number_everywhere(inputs[0]) is not None:
        branch = inputs[1 if number_everywhere(inputs[0]) else 2]
        return [branch] if branch.type == node.outputs[0].type else None
    return None


def _program(shards: Shards, inputs: Sequence[theano.Variable]) -> Program:
    """Return the Program of the needed part of some Shards."""
    outputs, handed_over = _outputs(shards, inputs)
    needed = set(ancestors([output.variable for output in outputs if output.reduction is None]))
    last = [Exchange(v, *shards.exchanges[v]) for v in shards.exchanges if v in needed] + handed_over
    wanted: dict[int, list[theano.Variable]] = {}

    def want(variables: Iterable[theano.Variable]) -> None:
        for variable in variables:
            wanted.setdefault(max(0, shards.stage(variable)), []).append(variable)
    want(output.variable for output in outputs if output.reduction is not None)
    want(exchange.source for exchange in last)
    stages: list[Stage] = []
    new: dict[theano.Variable, theano.Variable] = {}
    for i in reversed(range(max(wanted, default=-1) + 1)):
        of_stage = list(dict.fromkeys(wanted.get(i, [])))
        read = [v for v in ancestors(of_stage) if v.owner is None]
        exchanges = [Exchange(v, *shards.exchanges[v]) for v in read if v in shards.exchanges]
        values = SavedValues(shards, i, {v: shards.saved[v] for v in read if v in shards.saved})
        if values.again:
            new.update(zip(of_stage, substitute(of_stage, values.again)))
        want([exchange.source for exchange in exchanges] + list(values.saved.values()))
        stages.insert(0, Stage(exchanges, values.saved, of_stage))
    early = {exchange.variable for stage in stages for exchange in stage.exchanges}
    last = [each for each in last if each.variable not in early]
    sources = [each.source for each in [*last, *(each for stage in stages for each in stage.exchanges)]]
    return Program(list(inputs), shards.numbers, stages, last, outputs, whole=next(map(str, shards.refusals), ''),
                   n_whole=shards.n_whole, tables=most_bytes_of_rows(shards, sources)).renamed(new)


def _outputs(shards: Shards, inputs: Sequence[theano.Variable]) -> tuple[list[Output], list[Exchange]]:
    """Return the Outputs, and the exchanges by which a stage hands over values to those that need no replica."""
    values = list(shards.outputs)
    for i, value in enumerate(values):
        if value.kind == ROWS and value.state.outer is not None:
            values[i] = shards.gathered(value)
        elif value.kind == PARTIAL:
            values[i] = shards.whole(value)
    constants = [value.variable for value in values if value.kind == CONSTANT]
    graphs, exchanges = _graphs_of_constants(shards, inputs, constants)
    outputs = []
    for value in values:
        graph = graphs.get(value.variable)
        outputs.append(Output(value.variable, Gather(value.axis)) if value.kind == ROWS else
                       Output(value.variable, SAME) if graph is None else Output(graph, None))
    return outputs, exchanges


def _graphs_of_constants(shards, inputs, constants):
    """Return constants as functions of exchanged values, without the values that a stage computes; and exchanges.

    Of random numbers, which are drawn once, and of loops that may have constant results beside those that need samples,
    there are no graphs. The exchanges are of constants that a stage hands over since they need the samples, such as
    their number by the shape of an array.
    """
    own, inlined, handed_over = set(inputs).union(shards.numbers[1:]), {}, {}

    @functools.lru_cache(None)
    def can_be(variable):
        """Return whether a constant can be computed of exchanged values; note the further values that it needs."""
        needed = ancestors([variable])
        if any(v in own or v.owner and isinstance(v.owner.op, DRAWS) for v in needed):
            return False
        saved = {v: shards.saved[v] for v in needed if v in shards.saved}
        for placeholder, source in saved.items():
            if can_be(source):
                inlined[placeholder] = source
            elif source in shards.constants and not _is_half_empty(source):
                handed_over[placeholder] = source
            else:
                return False
        return True
    fit = graphs = [variable for variable in constants if can_be(variable)]
    while any(v in inlined for v in ancestors(graphs)):
        graphs = substitute(graphs, inlined)
    needed = set(ancestors(graphs))
    return dict(zip(fit, graphs)), [Exchange(v, source, SAME) for v, source in handed_over.items() if v in needed]


def _is_half_empty(variable):
    """Return whether a variable is made of memory of any content, such as that into which a loop writes."""
    return any(v.owner and isinstance(v.owner.op, AllocEmpty) for v in ancestors([variable]))
