"""Random numbers: every replica draws for the whole batch, or each one for its own samples."""
from __future__ import annotations

from collections import Counter

import theano
import theano.tensor as T
from theano.compile import SharedVariable
from theano.gof.graph import io_toposort
from theano.sandbox.multinomial import MultinomialFromUniform
from theano.tensor import raw_random
from theano.tensor.raw_random import RandomFunction

from ...placement.tags import place_of_node
from ...random_streams import DRAWS, is_random_state
from ..shards import rule
from ..sizes import elements, number
from ..states import CONSTANT, COUNT, DEPENDENT, ROWS, WHOLE, rows
from .base import all_rows, constants, only_rows_on, own_rows

# Functions of RandomStreams that draw each number, or vector, independently of the others.
SEPARATE = ('uniform', 'normal', 'binomial', 'poisson', raw_random.random_integers_helper,
            raw_random.permutation_helper, raw_random.multinomial_helper)
MADE_OF_SAMPLES = 'how many numbers it draws, or its random state, is made of samples'


def streams_of_one_draw(outputs: list[theano.Variable]) -> set[SharedVariable]:
    """Return random states that one op reads, an op that draws, and whose new value is one of the outputs.

    None in a graph that is placed: there each replica draws the numbers of the whole batch.

    Parameters
    ----------
    outputs : list of theano.Variable

    Returns
    -------
    set of SharedVariable
    """
    nodes = io_toposort([], outputs)
    readers = Counter(variable for node in nodes for variable in node.inputs)
    n_outputs = Counter(outputs)
    streams = set()
    for node in nodes:
        state, new = node.inputs[0] if node.inputs else None, node.outputs[0]
        if isinstance(node.op, DRAWS) and isinstance(state, SharedVariable) and is_random_state(state) \
                and readers[state] == n_outputs[new] == 1 and not readers[new] and not n_outputs[state] \
                and place_of_node(node) is None:
            streams.add(state)
    return streams


@rule(*DRAWS, of=CONSTANT)
def _draw(shards, node, values):
    state, size = constants(shards, node, values[:2], MADE_OF_SAMPLES)
    parameters = shards.wholes(values[2:])
    axis = _own_axis(shards, node, size, parameters)
    if axis is not None:
        shards.independent.append(node.inputs[0])

        def own_size(sizes):
            return T.set_subtensor(sizes[axis], T.cast(sizes[axis] // shards.total * shards.own, sizes.dtype))
        places = _places(node, axis, node.outputs[1].ndim - node.op.ndim_added) if parameters else []
        own = [own_rows(shards, value, place) for value, place in zip(parameters, places)]
        drawn = shards.apply(node, [state, shards.make(own_size, [size], WHOLE)] + own, [WHOLE, rows(axis)])
    else:
        of_samples = any(value.kind == ROWS or value.state.size is not None for value in parameters)
        drawn = shards.apply(node, [state, size] + list(map(shards.gathered, parameters)),
                             DEPENDENT if of_samples else WHOLE)
    # Numbers are drawn once, in the first stage, and saved for the stages that need them.
    drawn = [value._replace(stage=max(0, value.stage)) for value in drawn]
    shards.stages.update((value.variable, value.stage) for value in drawn)
    return drawn


def _own_axis(shards, node, size, parameters):
    """Return the axis of the samples, where each replica can draw for its own ones only; else None."""
    if node.inputs[0] not in shards.streams or isinstance(node.op, RandomFunction) and node.op.fn not in SEPARATE:
        return None
    sizes = list(elements(node.inputs[1], size.state.size) or ())
    if sizes.count(COUNT) != 1 or sizes.count(None) != len(sizes) - 1:
        return None
    axis = sizes.index(COUNT)
    lie_alike = all(value.kind != ROWS or value.axis == place and value.state.outer is None
                    for value, place in zip(parameters, _places(node, axis, len(sizes))))
    return axis if lie_alike else None


def _places(node, axis, ndim):
    """Return the axis of the samples in each parameter, negative where a parameter is the same for all."""
    vectors = [node.op.fn is raw_random.multinomial_helper and i == 1 for i in range(len(node.inputs) - 2)]
    return [v.ndim - is_vector - (ndim - axis) for v, is_vector in zip(node.inputs[2:], vectors)]


@rule(MultinomialFromUniform, of=ROWS)
def _chosen(shards, node, values):
    """Draw for each sample by its own probabilities, n times; the first draw of all samples comes first."""
    times = number(node.inputs[2]) if len(values) > 2 else 1
    if times is None or values[1].kind == ROWS and times != 1:
        shards.refuse(node, 'it draws several times for each sample, from numbers that lie in another order')
    only_rows_on(shards, node, values[:2], 0)
    p, = all_rows(shards, values[:1], 0)
    uniform, = all_rows(shards, values[1:2], 0, None if times == 1 else T.constant(int(times)))
    return shards.apply(node, [p, uniform] + values[2:], rows())
