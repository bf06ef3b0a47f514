"""Cut the graph of one device into stages, each of which a replica computes without hearing from another one."""
from collections import namedtuple

from theano.gof.graph import ancestors

from ..analysis import CONSTANT, FREE, PARTIAL, ROWS, CannotCut, Shards
from ..analysis.rules.draws import streams_of_one_draw
from ..graph import substitute
from .carrying import Carrying
from .lowering import lowered

Exchange = namedtuple('Exchange', 'variable source how')
Exchange.__doc__ = """A value that replicas exchange: what stands for it, what each one gives, and how they are reduced.

`how` is 'sum', 'max', 'min', 'prod', ``('gather', axis)``, or 'stack': what each shard that has samples gives, along a
new axis 0, in the order of the samples.
"""

Stage = namedtuple('Stage', 'exchanges carried outputs')
Stage.__doc__ = """A stage: first the exchanges, then the graph of `outputs`.

`carried` maps what stands for a value of an earlier stage to that value.
"""

Output = namedtuple('Output', 'variable stage how')
Output.__doc__ = """An output of a program: a variable of a stage, and how those of the replicas are put together.

`how` is None for what is the same on each, ``('gather', axis)``, or as for an `Exchange`.
"""


class Program(namedtuple('Program', 'inputs numbers stages outputs streams')):
    """What replicas compute and exchange for a graph over a batch.

    Attributes
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0.
    numbers : list of theano.Variable
        Samples of the whole batch, samples of the replica, place of its first sample.
    stages : list of Stage
    outputs : list of Output
        In the order of the graph's.
    streams : list of SharedVariable
        Random states that each replica has one of its own of, to draw for its own samples only. What the outputs have
        as new value of one, though its `how` is None, differs from replica to replica.
    """


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
    given, exchanged, late = set(ancestors(outputs)), set(), {}
    while True:
        shards = Shards(inputs, outputs, exchanged, late, statistics, streams)
        twice = shards.exchanged_twice() & given - exchanged
        if twice:
            exchanged |= twice
            continue
        program = _program(shards, inputs)
        postponed = {shards.given(source) for source in _not_needed_yet(program)} & given - set(late)
        if not postponed:
            return _program(shards, inputs, leaner=True)
        late.update(dict.fromkeys(postponed, len(program.stages) - 1))


def _program(shards, inputs, leaner=False):
    """The Program of what is needed of some Shards, `leaner` without carrying what is cheap to compute again."""
    found = [_output(value) for value in shards.outputs]
    last = max([0] + [output.stage for output in found])
    wanted = [[] for _ in range(last + 1)]
    for output in found:
        wanted[output.stage].append(output.variable)
    stages, new = [], {}
    for number in reversed(range(last + 1)):
        outputs = list(dict.fromkeys(wanted[number]))
        met = [v for v in ancestors(outputs) if v.owner is None]
        exchanges = [Exchange(v, *shards.exchanges[v]) for v in met if v in shards.exchanges]
        carried = {v: shards.carried[v] for v in met if v in shards.carried}
        if leaner and carried:
            carrying = Carrying(shards, number, carried)
            carried = carrying.carried
            new.update(zip(outputs, substitute(outputs, carrying.again)))
        for source in [exchange.source for exchange in exchanges] + list(carried.values()):
            wanted[_place(shards, source)].append(source)
        stages.insert(0, Stage(exchanges, carried, outputs))
    return Program(list(inputs), shards.numbers, [_renamed(stage, new) for stage in stages],
                   [output._replace(variable=new.get(output.variable, output.variable)) for output in found],
                   shards.independent)


def _renamed(stage, new):
    return Stage([exchange._replace(source=new.get(exchange.source, exchange.source)) for exchange in stage.exchanges],
                 {place: new.get(source, source) for place, source in stage.carried.items()},
                 [new.get(output, output) for output in stage.outputs])


def _not_needed_yet(program):
    """Sources of the exchanges ahead of the last one that no other exchange needs, such as of gradients."""
    needed, found = set(), []
    for stage in reversed(program.stages):
        met = set(ancestors([output for output in stage.outputs if output in needed]))
        needed.update(exchange.source for exchange in stage.exchanges)
        needed.update(source for place, source in stage.carried.items() if place in met)
        if stage is not program.stages[-1]:
            found += [exchange.source for exchange in stage.exchanges if exchange.variable not in met]
    return found


def _place(shards, variable):
    return max(0, shards.stages.get(variable, FREE))


def _output(value):
    how = {CONSTANT: None, PARTIAL: value.state.how, ROWS: ('gather', value.axis)}[value.kind]
    if value.kind == ROWS and value.state.outer is not None:
        raise CannotCut('the output %s has its samples merged into another axis' % value.variable)
    return Output(value.variable, max(0, value.stage), how)
