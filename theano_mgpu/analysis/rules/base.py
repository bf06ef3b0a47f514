"""What several families share."""
from theano.tensor import basic

from ..states import CONSTANT, PARTIAL, ROWS, rows


def is_zero(variable):
    """Whether all elements of a variable are known to be 0."""
    return number_everywhere(variable) == 0


def number_everywhere(variable):
    """The number that all elements of a variable are known to be, else None."""
    try:
        return float(basic.get_scalar_constant_value(variable, elemwise=True))
    except (basic.NotScalarConstantError, TypeError, ValueError):
        return None


def wholes(shards, values):
    """The values with the partial ones exchanged."""
    return [shards.whole(value) if value.kind == PARTIAL else value for value in values]


def same_rows(shards, node, values):
    """The state of the rows among the values, which must lie along one axis in one order."""
    found = [value.state for value in values if value.kind == ROWS]
    if len({(state.axis, state.outer is not None) for state in found}) > 1:
        shards.refuse(node, 'samples lie along different axes of its inputs')
    return found[0]


def aligned(shards, node, values):
    """Values of as many dimensions as the output, with the replica's rows of each constant that has them all."""
    state = same_rows(shards, node, values)
    found = []
    for value in values:
        if value.kind == CONSTANT and value.variable.ndim > state.axis \
                and not value.variable.type.broadcastable[state.axis]:
            value = shards.cut(value, state.axis, state.outer)
        found.append(value)
    return found, state


def only_rows_on(shards, node, values, axis):
    """Check that the samples of all rows lie along one axis, unmerged; returns the state."""
    for value in values:
        if value.kind == ROWS and (value.axis != axis or value.state.outer is not None):
            shards.refuse(node, 'the samples do not lie along axis %d' % axis)
    return rows(axis)
