"""Random numbers: every replica draws those of the whole batch, or each one those of its own samples."""
from collections import Counter

import theano.tensor as T
from theano.compile import SharedVariable
from theano.gof.graph import io_toposort
from theano.sandbox.multinomial import MultinomialFromUniform
from theano.tensor import raw_random
from theano.tensor.raw_random import RandomFunction

from ...patches.placement_tags import place_of_node
from ...replicas.random_streams import DRAWS, is_random_state
from ..shards import rule
from ..sizes import elements, number
from ..states import CONSTANT, COUNT, NUMBER, ROWS, WHOLE, State, rows
from .base import constants, only_rows_on, wholes

# Functions of RandomStreams each of whose numbers, or vectors, is independent of the other ones.
SEPARATE = ('uniform', 'normal', 'binomial', 'poisson', raw_random.random_integers_helper,
            raw_random.permutation_helper, raw_random.multinomial_helper)
MADE_OF_SAMPLES = 'how many numbers it draws, or its random state, is made of samples'


def streams_of_one_draw(outputs):
    """Random states that one op reads, an op that draws, and whose new value is one of the outputs.

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
    given = Counter(outputs)
    found = set()
    for node in nodes:
        state, new = node.inputs[0] if node.inputs else None, node.outputs[0]
        if isinstance(node.op, DRAWS) and isinstance(state, SharedVariable) and is_random_state(state) \
                and readers[state] == given[new] == 1 and not readers[new] and not given[state] \
                and place_of_node(node) is None:
            found.add(state)
    return found


@rule(*DRAWS)
def _draw(shards, node, values):
    values = constants(shards, node, values[:2], MADE_OF_SAMPLES) + wholes(shards, values[2:])
    axis = _own_axis(shards, node, values)
    if axis is not None:
        shards.independent.append(node.inputs[0])
        own = [_own_size(shards, values[1], axis)] + _own_parameters(shards, node, values, axis)
        drawn = shards.apply(node, values[:1] + own, [WHOLE, rows(axis)])
    else:
        values = [shards.gathered(value) if value.kind == ROWS else value for value in values]
        of_samples = any(value.state.size is not None for value in values[2:])
        drawn = shards.apply(node, values, State(CONSTANT, size=NUMBER) if of_samples else WHOLE)
    # In the first stage, not in each one that needs them.
    drawn = [value._replace(stage=max(0, value.stage)) for value in drawn]
    for value in drawn:
        shards.stages[value.variable] = value.stage
    return drawn


_draw.for_constants = True


def _own_axis(shards, node, values):
    """The axis of the samples, where each replica can draw for its own ones only; else None."""
    if node.inputs[0] not in shards.streams or isinstance(node.op, RandomFunction) and node.op.fn not in SEPARATE:
        return None
    sizes = list(elements(node.inputs[1], values[1].state.size) or ())
    if sizes.count(COUNT) != 1 or sizes.count(None) != len(sizes) - 1:
        return None
    axis = sizes.index(COUNT)
    if any(value.kind == ROWS and (value.axis != place or value.state.outer is not None)
           for value, place in zip(values[2:], _places(node, axis, len(sizes)))):
        return None
    return axis


def _places(node, axis, ndim):
    """Where the samples lie in the parameters, negative where a parameter is the same for all."""
    vectors = [node.op.fn is raw_random.multinomial_helper and i == 1 for i in range(len(node.inputs) - 2)]
    return [v.ndim - is_vector - (ndim - axis) for v, is_vector in zip(node.inputs[2:], vectors)]


def _own_size(shards, size, axis):
    def own(sizes):
        return T.set_subtensor(sizes[axis], T.cast(sizes[axis] // shards.total * shards.own, sizes.dtype))
    return shards.make(own, [size], WHOLE)


def _own_parameters(shards, node, values, axis):
    places = _places(node, axis, node.outputs[1].ndim - node.op.ndim_added) if len(values) > 2 else []
    return [shards.cut(value, place, widens=True) if value.kind == CONSTANT and place >= 0
            and not value.variable.type.broadcastable[place] else value for value, place in zip(values[2:], places)]


@rule(MultinomialFromUniform)
def _chosen(shards, node, values):
    """What is drawn by probabilities that each sample has its own of, n times; first once for each of them."""
    p, uniform, *n = wholes(shards, values)
    if p.kind == uniform.kind == CONSTANT:
        return shards.constant(node, [p, uniform] + n)
    times = number(node.inputs[2]) if n else 1
    if times is None or uniform.kind == ROWS and times != 1:
        shards.refuse(node, 'it draws several times for each sample, from numbers that lie in another order')
    only_rows_on(shards, node, [p, uniform], 0)
    if uniform.kind == CONSTANT:
        uniform = shards.cut(uniform, 0, None if times == 1 else T.constant(int(times)))
    if p.kind == CONSTANT:
        p = shards.cut(p, 0)
    return shards.apply(node, [p, uniform] + n, rows())
