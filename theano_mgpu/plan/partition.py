"""Cut the graph of one device into stages, each of which a replica computes without hearing from another one."""
from typing import Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors
from theano.tensor.basic import AllocEmpty

from ..analysis import CONSTANT, FREE, PARTIAL, ROWS, SAME, CannotCut, Gather, Reduction, Shards
from ..analysis.rules.draws import streams_of_one_draw
from ..graphs.graph import substitute
from ..replicas.random_streams import DRAWS
from .carrying import Carrying
from .lowering import lowered


class Exchange(NamedTuple):
    """A value that replicas exchange: its placeholder, the value that each one gives, and how these are reduced."""

    variable: theano.Variable
    source: theano.Variable
    reduction: Reduction


class Stage(NamedTuple):
    """A stage: first the exchanges, then the graph of `outputs`, computed by each replica.

    `carried` maps each placeholder of a value of an earlier stage to that value.
    """

    exchanges: List[Exchange]
    carried: Dict[theano.Variable, theano.Variable]
    outputs: List[theano.Variable]


class Output(NamedTuple):
    """An output of a program.

    `reduction` is a Gather for rows that a stage computes, `SAME` for a value that a stage computes alike on each
    replica, and None for a graph of exchanged values and constants, which needs no replica.
    """

    variable: theano.Variable
    reduction: Optional[Reduction]

    @property
    def has_rows(self) -> bool:
        """Whether the output has rows of single samples."""
        return isinstance(self.reduction, Gather)


class Program(NamedTuple):
    """What replicas compute and exchange for a graph over a batch.

    Attributes
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0.
    numbers : list of theano.Variable
        Samples of the whole batch, samples of the replica, place of its first sample; and where each process has data
        of its own, place of the first sample of the process.
    stages : list of Stage
    exchanges : list of Exchange
        After the last stage.
    outputs : list of Output
        In the order of the graph's.
    streams : list of SharedVariable
        Random states that each replica has one of its own of, to draw for its own samples only. The new value of such
        a state differs from replica to replica.
    own : collection of SharedVariable
        Data sets of which each process has its own part.
    given : list of theano.Variable
        Inputs of a call: those with samples, and those that every replica gets whole.
    updated : list of SharedVariable
        The last of the outputs are their new values.
    """

    inputs: List[theano.Variable]
    numbers: List[theano.Variable]
    stages: List[Stage]
    exchanges: List[Exchange]
    outputs: List[Output]
    streams: Sequence[SharedVariable]
    own: Collection[SharedVariable] = ()
    given: Sequence[theano.Variable] = ()
    updated: Sequence[SharedVariable] = ()

    @property
    def is_divided(self) -> bool:
        """Whether replicas compute it in parts; else one replica computes it as it is."""
        return bool(self.numbers)


def undivided(outputs: Sequence[theano.Variable]) -> Program:
    """The Program of a graph that one replica computes as it is, with the whole batch."""
    return Program([], [], [Stage([], {}, list(dict.fromkeys(outputs)))], [],
                   [Output(output, SAME) for output in outputs], [])


def expressed(program: Program, expressions: Mapping[theano.Variable, theano.Variable]) -> Program:
    """A program in which replicas compute some of the inputs.

    Parameters
    ----------
    program : Program
    expressions : dict of theano.Variable to theano.Variable
        Those inputs, as functions of what every replica has, and of the program's `numbers`.

    Returns
    -------
    Program
    """
    sources = [source for stage in program.stages for source in stage.outputs]
    new = dict(zip(sources, substitute(sources, expressions)))
    stages = [_renamed(stage, new) for stage in program.stages]
    return program._replace(
        inputs=[variable for variable in program.inputs if variable not in expressions], stages=stages,
        exchanges=_renamed(Stage(program.exchanges, {}, []), new).exchanges,
        outputs=[output._replace(variable=new.get(output.variable, output.variable)) for output in program.outputs])


def partition(inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], statistics: str = 'exact',
              random: str = 'exact') -> Program:
    """Cut a graph where samples meet.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0; everything else that the graph reads is the same on every replica.
    outputs : list of theano.Variable
        Of host variables, not yet optimised.
    statistics : {'exact', 'local'}
        What batch normalisation normalises by in training: the statistics of the whole batch, or of each shard. As by
        torch.nn.DataParallel, tf.distribute.MirroredStrategy and Horovod, local ones need no exchange.
    random : {'exact', 'independent'}
        Whether each replica draws the numbers of the whole batch, or where that is possible those of its own samples
        only, from a random state of its own.

    Returns
    -------
    Program
        Its inputs are `inputs`; shared variables stay what they are.

    Raises
    ------
    CannotCut
        If the graph cannot be computed exactly from shards.

    Notes
    -----
    As GSPMD (Xu et al., 2021) has it, a dimension that is sharded and summed over leaves partial sums, and these
    become an all-reduce; here a stage ends there.
    """
    outputs = lowered(outputs, statistics)
    streams = streams_of_one_draw(outputs) if random == 'independent' else ()
    try:
        return _partition(inputs, outputs, statistics, streams)
    except CannotCut:
        if not streams:
            raise
        # Numbers of all samples can lie in any order, those of a replica in that of its samples.
        return _partition(inputs, outputs, statistics, ())


def _partition(inputs, outputs, statistics, streams):
    given, exchanged = set(ancestors(outputs)), set()
    while True:
        shards = Shards(inputs, outputs, exchanged, statistics, streams)
        twice = shards.exchanged_twice() & given - exchanged
        if not twice:
            return _program(shards, inputs)
        exchanged |= twice


def _program(shards, inputs):
    """The Program of what is needed of some Shards."""
    found, handed = _outputs(shards, inputs)
    in_stages = [output.variable for output in found if output.reduction is not None]
    met = set(ancestors([output.variable for output in found if output.reduction is None]))
    last = [Exchange(v, *shards.exchanges[v]) for v in shards.exchanges if v in met] + handed
    wanted = {}
    for variable in in_stages + [exchange.source for exchange in last]:
        wanted.setdefault(_place(shards, variable), []).append(variable)
    stages, new = [], {}
    for number in reversed(range(max(wanted, default=-1) + 1)):
        outputs = list(dict.fromkeys(wanted.get(number, [])))
        met = [v for v in ancestors(outputs) if v.owner is None]
        exchanges = [Exchange(v, *shards.exchanges[v]) for v in met if v in shards.exchanges]
        carried = {v: shards.carried[v] for v in met if v in shards.carried}
        if carried:
            carrying = Carrying(shards, number, carried)
            carried = carrying.carried
            new.update(zip(outputs, substitute(outputs, carrying.again)))
        for source in [exchange.source for exchange in exchanges] + list(carried.values()):
            wanted.setdefault(_place(shards, source), []).append(source)
        stages.insert(0, Stage(exchanges, carried, outputs))
    early = {exchange.variable for stage in stages for exchange in stage.exchanges}
    last = [exchange for exchange in last if exchange.variable not in early]
    return Program(list(inputs), shards.numbers, [_renamed(stage, new) for stage in stages],
                   _renamed(Stage(last, {}, []), new).exchanges,
                   [output._replace(variable=new.get(output.variable, output.variable)) for output in found],
                   shards.independent)


def _outputs(shards, inputs):
    """The Outputs, and what a stage hands over to those that need no replica: exchanges."""
    values = list(shards.outputs)
    for i, value in enumerate(values):
        if value.kind == ROWS and value.state.outer is not None:
            values[i] = shards.gathered(value)
        elif value.kind == PARTIAL:
            values[i] = shards.exchange(value, value.state.reduction)
    together = _Together(shards, inputs, [value.variable for value in values if value.kind == CONSTANT])
    outputs = []
    for value in values:
        alone = together.found.get(value.variable)
        reduction = Gather(value.axis) if value.kind == ROWS else SAME if alone is None else None
        outputs.append(Output(alone if reduction is None else value.variable, reduction))
    return outputs, together.exchanges


class _Together:
    """Constants as functions of exchanged values, not of what a stage computes.

    Attributes
    ----------
    found : dict of theano.Variable to theano.Variable
        Without those that a replica has to compute: what is drawn is drawn once, and a loop may have constant results
        beside those that need samples.
    exchanges : list of Exchange
        What a stage hands over: constants that need the samples, such as their number by the shape of an array.
    """

    def __init__(self, shards, inputs, constants):
        self._shards, self._own = shards, set(inputs).union(shards.numbers[1:])
        self._memo, self._inlined, self._handed = {}, {}, {}
        fit = [variable for variable in constants if self._can_be(variable)]
        variables = fit
        while any(place in self._inlined for place in ancestors(variables)):
            variables = substitute(variables, self._inlined)
        self.found = dict(zip(fit, variables))
        met = set(ancestors(variables))
        self.exchanges = [Exchange(place, source, SAME) for place, source in self._handed.items() if place in met]

    def _can_be(self, variable):
        """Whether a constant can be computed of exchanged values, and what else is handed over."""
        met = ancestors([variable])
        if any(v in self._own or v.owner and isinstance(v.owner.op, DRAWS) for v in met):
            return False
        carried = {place: self._shards.carried[place] for place in met if place in self._shards.carried}
        for place, source in carried.items():
            if source not in self._memo:
                self._memo[source] = self._can_be(source)
            if self._memo[source]:
                self._inlined[place] = source
            elif source in self._shards.constants and not _is_half_empty(source):
                self._handed[place] = source
            else:
                return False
        return True


def _is_half_empty(variable):
    """Whether a variable is made of memory that holds anything, such as what a loop writes into."""
    return any(v.owner and isinstance(v.owner.op, AllocEmpty) for v in ancestors([variable]))


def _renamed(stage, new):
    return Stage([exchange._replace(source=new.get(exchange.source, exchange.source)) for exchange in stage.exchanges],
                 {place: new.get(source, source) for place, source in stage.carried.items()},
                 [new.get(output, output) for output in stage.outputs])


def _place(shards, variable):
    return max(0, shards.stages.get(variable, FREE))
