"""Cut the graph of one device into stages, each of which a replica computes without hearing from another one."""
from collections import namedtuple

from theano.gof.graph import ancestors
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.tensor.raw_random import RandomFunction

from ..analysis import CONSTANT, FREE, PARTIAL, ROWS, CannotCut, Shards
from ..analysis.rules.draws import streams_of_one_draw
from ..graph import substitute
from .carrying import Carrying
from .lowering import lowered

DRAWS = (mrg_uniform_base, RandomFunction)

Exchange = namedtuple('Exchange', 'variable source how')
Exchange.__doc__ = """A value that replicas exchange: what stands for it, what each one gives, and how they are reduced.

`how` is 'sum', 'max', 'min', 'prod', ``('gather', axis)``, or 'stack': what each shard that has samples gives, along a
new axis 0, in the order of the samples.
"""

Stage = namedtuple('Stage', 'exchanges carried outputs')
Stage.__doc__ = """A stage: first the exchanges, then the graph of `outputs`, computed by each replica.

`carried` maps what stands for a value of an earlier stage to that value.
"""

OWN = 'own'
Output = namedtuple('Output', 'variable how')
Output.__doc__ = """An output of a program.

`how` is ``('gather', axis)`` for rows that a stage computes, `OWN` for what a stage computes alike on each replica, and
None for a graph of exchanged values and constants, which needs no replica.
"""


class Program(namedtuple('Program', 'inputs numbers stages exchanges outputs streams')):
    """What replicas compute and exchange for a graph over a batch.

    Attributes
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0.
    numbers : list of theano.Variable
        Samples of the whole batch, samples of the replica, place of its first sample.
    stages : list of Stage
    exchanges : list of Exchange
        After the last stage.
    outputs : list of Output
        In the order of the graph's.
    streams : list of SharedVariable
        Random states that each replica has one of its own of, to draw for its own samples only. What the outputs have
        as new value of one differs from replica to replica.
    """


def undivided(outputs):
    """The Program of a graph that one replica computes as it is, with the whole batch."""
    return Program([], [], [Stage([], {}, list(dict.fromkeys(outputs)))], [],
                   [Output(output, OWN) for output in outputs], [])


def partition(inputs, outputs, statistics='exact', random='exact'):
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
    found = _outputs(shards, inputs)
    in_stages = [output.variable for output in found if output.how is not None]
    met = set(ancestors([output.variable for output in found if output.how is None]))
    last = [Exchange(v, *shards.exchanges[v]) for v in shards.exchanges if v in met]
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
    found = list(shards.outputs)
    for i, value in enumerate(found):
        if value.kind == ROWS and value.state.outer is not None:
            raise CannotCut('the output %s has its samples merged into another axis' % value.variable)
        if value.kind == PARTIAL:
            found[i] = shards.exchange(value, value.state.how)
    constants = [value.variable for value in found if value.kind == CONSTANT]
    alone = dict(zip(constants, _without_replicas(shards, constants)))
    found = [Output(value.variable, ('gather', value.axis)) if value.kind == ROWS else
             Output(alone[value.variable], None) for value in found]
    # A loop may have constant results beside those that need samples, and what is drawn is drawn once.
    return [Output(value.variable, OWN) if output.how is None and _needs_replica(shards, inputs, output.variable)
            else output for value, output in zip(shards.outputs, found)]


def _without_replicas(shards, variables):
    """Constants as functions of exchanged values, not of what a stage computes."""
    while True:
        carried = {v: shards.carried[v] for v in ancestors(variables) if v in shards.carried}
        if not carried:
            return variables
        variables = substitute(variables, carried)


def _needs_replica(shards, inputs, variable):
    needed = set(inputs).union(shards.numbers[1:])
    return any(v in needed or v.owner and isinstance(v.owner.op, DRAWS) for v in ancestors([variable]))


def _renamed(stage, new):
    return Stage([exchange._replace(source=new.get(exchange.source, exchange.source)) for exchange in stage.exchanges],
                 {place: new.get(source, source) for place, source in stage.carried.items()},
                 [new.get(output, output) for output in stage.outputs])


def _place(shards, variable):
    return max(0, shards.stages.get(variable, FREE))
