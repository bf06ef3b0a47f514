"""What several families share."""
import numpy as np
import theano
import theano.tensor as T
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise
from theano.tensor.type_other import NoneTypeT

from ..sizes import number
from ..states import CONSTANT, PARTIAL, ROWS, partial, rows


def share(shards, value):
    """Return a CONSTANT as a share of a sum: the replica of the first sample has all of it."""
    return shards.make(lambda variable: T.switch(T.eq(shards.first, 0), variable, T.zeros_like(variable)), [value],
                       partial(), like=value.variable)


def is_zero(variable):
    """Whether all elements of a variable are known to be 0."""
    node = variable.owner
    if node and isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, scalar.Mul):
        return any(map(is_zero, node.inputs))
    return number_everywhere(variable) == 0


def number_everywhere(variable):
    """The number that all elements of a variable are known to be, else None."""
    try:
        return float(basic.get_scalar_constant_value(variable, elemwise=True))
    except (basic.NotScalarConstantError, TypeError, ValueError):
        return None


def known(part):
    """A part of a slice: a number where it is known, else the variable."""
    if part is None or isinstance(part, theano.Variable) and isinstance(part.type, NoneTypeT):
        return None
    found = number(part)
    return part if found is None else found


def widens(node, i=0):
    """Whether an output can hold all that an input can, so that a sum over replicas stays what it is."""
    before, after = (np.dtype(v.dtype) for v in (node.inputs[i], node.outputs[0]))
    # A sum of small whole numbers begins anew where it is too large.
    return before == after or np.can_cast(before, after, 'safe') and (before.kind not in 'iu' or before.itemsize == 8)


def wholes(shards, values):
    """The values with the partial ones exchanged."""
    return [shards.whole(value) if value.kind == PARTIAL else value for value in values]


def constants(shards, node, values, reason):
    """The values as CONSTANTS; a node that has rows among them is refused."""
    values = wholes(shards, values)
    if any(value.kind != CONSTANT for value in values):
        shards.refuse(node, reason)
    return values


def same_rows(shards, node, values):
    """The state of the rows among the values, which must lie along one axis in one order."""
    found = [value.state for value in values if value.kind == ROWS]
    if not found:
        shards.refuse(node, 'samples are where none are expected')
    if len({(state.axis, state.outer is not None) for state in found}) > 1:
        shards.refuse(node, 'samples lie along different axes of its inputs')
    return found[0]


def in_order(shards, node, value, outer):
    """A value; if samples are merged into another axis of it, it is checked that they lie as in other such rows."""
    if value.kind != ROWS or value.state.outer is outer:
        return value
    both = [shards.length(value.state.outer), shards.length(outer)]
    return shards.make(lambda v, a, b: shards.check(node, 'samples lie in different orders', v, T.eq(a, b)),
                       [value] + both, value.state._replace(outer=outer))


def same_order(shards, node, values):
    """The values, whose samples lie along one axis or are all merged into another one: in one order, too."""
    outers = [value.state.outer for value in values if value.kind == ROWS]
    return [in_order(shards, node, value, outers[0]) if outers else value for value in values]


def aligned(shards, node, values):
    """Values of as many dimensions as the output, with the replica's rows of each constant that has them all."""
    # Where each sample meets each other one, as in x - x.dimshuffle(1, 0), replicas get all of the other ones.
    first = min((value.axis for value in values if value.kind == ROWS), default=None)
    values = [shards.gathered(value) if value.kind == ROWS and value.axis != first else value
              for value in values]
    state = same_rows(shards, node, values)
    found = []
    for value in same_order(shards, node, values):
        if value.kind == CONSTANT and value.variable.ndim > state.axis \
                and not value.variable.type.broadcastable[state.axis]:
            value = shards.cut(value, state.axis, state.outer, widens=not isinstance(node.op, elemwise.Elemwise))
        found.append(value)
    return found, state


def rows_along(shards, node, values, axis):
    """The values, of which all that are rows must lie along one axis, in one order; and their state."""
    state = same_rows(shards, node, values)
    if state.axis != axis:
        shards.refuse(node, 'the samples do not lie along axis %d' % axis)
    return same_order(shards, node, values), state


def only_rows_on(shards, node, values, axis):
    """Check that the samples of all rows lie along one axis, unmerged; returns the state."""
    for value in values:
        if value.kind == ROWS and (value.axis != axis or value.state.outer is not None):
            shards.refuse(node, 'the samples do not lie along axis %d' % axis)
    return rows(axis)
