"""Helpers of several families of rules."""
from __future__ import annotations

import numpy as np
import theano
import theano.tensor as T

from ..rows import rows_of_each
from ..shards import Shards, rule_of
from ..states import CONSTANT, PARTIAL, ROWS, WHOLE, State, Value, has_rows, partial, rows

DIFFERENT_AXES = 'samples lie along different axes of its inputs'
OTHER_AXIS = 'the samples do not lie along axis %d'
OTHER_LENGTHS = 'its inputs do not have as many rows of each sample'


def share(shards: Shards, value: Value) -> Value:
    """Return a CONSTANT as a share of a sum: the replica of the first sample has all of it."""
    return shards.make(lambda variable: T.switch(T.eq(shards.first, 0), variable, T.zeros_like(variable)), [value],
                       partial(), like=value.variable)


def shares_of(values: list[Value]) -> list[int]:
    """Return the positions of the PARTIAL ones among values."""
    return [i for i, value in enumerate(values) if value.kind == PARTIAL]


def widens(node: theano.Apply, i: int = 0) -> bool:
    """Return whether an output can hold all numbers of an input, so that a sum over replicas stays right."""
    before, after = (np.dtype(v.dtype) for v in (node.inputs[i], node.outputs[0]))
    # A sum of small integers wraps around when it is too large.
    return before == after or np.can_cast(before, after, 'safe') and (before.kind not in 'iu' or before.itemsize == 8)


# --- Values whose samples must lie along one axis ------------------------------------------------

def constants(shards: Shards, node: theano.Apply, values: list[Value], reason: str) -> list[Value]:
    """Return the values as CONSTANTS; a node that has rows among them is refused."""
    refuse_rows(shards, node, values, reason)
    return shards.wholes(values)


def refuse_rows(shards: Shards, node: theano.Apply, values: list[Value], reason: str) -> None:
    """Refuse a node that has rows among these values."""
    if has_rows(values):
        shards.refuse(node, reason)


def same_rows(shards: Shards, node: theano.Apply, values: list[Value]) -> State:
    """Return the state of the rows among the values, which must lie along one axis in one order."""
    states = [value.state for value in values if value.kind == ROWS]
    if not states:
        shards.refuse(node, 'samples are where none are expected')
    if len({(state.axis, state.outer is not None) for state in states}) > 1:
        shards.refuse(node, DIFFERENT_AXES)
    return states[0]


def in_order(shards: Shards, node: theano.Apply, value: Value, outer: theano.Variable | None) -> Value:
    """Return a value; samples that are merged into another axis are checked to lie as in rows with this `outer`."""
    if value.kind != ROWS or value.state.outer is outer:
        return value
    both = [Value(value.state.outer, WHOLE), Value(outer, WHOLE)]
    return shards.make(lambda v, a, b: shards.check(node, 'samples lie in different orders', v, T.eq(a, b)),
                       [value] + both, value.state._replace(outer=outer))


def known_rows(shards: Shards, values: list[Value]) -> Value:
    """Return the first rows among values; rows of the given graph come before others."""
    of_samples = [value for value in values if value.kind == ROWS]
    return next((value for value in of_samples if shards.given(value) is not None), of_samples[0])


def as_long(shards: Shards, node: theano.Apply, value: Value, like: Value) -> Value:
    """Return a value; rows are checked to be as many a sample as other rows, where neither op nor graph tells that."""
    if value is like or value.kind != ROWS or rule_of(node.op).compares_lengths:
        return value
    each = [rows_of_each(shards, v, axis) for v, axis in ((shards.given(value), value.axis),
                                                          (shards.given(like), like.axis)) if v is not None]
    if len(each) == 2 and each[0] == each[1]:
        return value
    return shards.make(lambda v, length: shards.check(
        node, OTHER_LENGTHS, v, T.eq(shards.whole_length(v, value.axis), length)), [value, shards.length(like)],
        value.state)


def same_order(shards: Shards, node: theano.Apply, values: list[Value]) -> list[Value]:
    """Return the values, whose samples lie along one axis or are all merged into another one.

    They are checked to be in one order, too, and to have as many rows of each sample.
    """
    if not has_rows(values):
        return values
    like = known_rows(shards, values)
    return [as_long(shards, node, in_order(shards, node, value, like.state.outer), like) for value in values]


def own_rows(shards: Shards, value: Value, axis: int, like: Value | None = None) -> Value:
    """Return the replica's rows of a CONSTANT with an axis of more than one row there; any other value as it is.

    A CONSTANT has to be as long as the rows `like` which it meets.
    """
    if value.kind != CONSTANT or not 0 <= axis < value.variable.ndim or value.variable.type.broadcastable[axis]:
        return value
    return shards.cut(value, axis) if like is None else shards.cut(value, axis, like.state.outer, shards.length(like))


def beside(shards: Shards, node: theano.Apply, y: Value, axis: int, like: Value) -> Value:
    """Return the replica's rows of a value that is written beside rows, which lie along this axis of the value."""
    if y.kind == ROWS and (y.axis != axis or (y.state.outer is None) != (like.state.outer is None)):
        shards.refuse(node, DIFFERENT_AXES)
    return own_rows(shards, as_long(shards, node, in_order(shards, node, y, like.state.outer), like), axis, like)


def all_rows(shards: Shards, values: list[Value], axis: int) -> list[Value]:
    """Return the values with each CONSTANT cut to the replica's rows."""
    like = known_rows(shards, values)
    return [shards.cut(value, axis, like.state.outer, shards.length(like)) if value.kind == CONSTANT else value
            for value in values]


def aligned(shards: Shards, node: theano.Apply, values: list[Value]) -> tuple[list[Value], State]:
    """Return the values, with the replica's rows of each constant that has all rows, and the state of the rows.

    The values have as many dimensions as the output: a vector beside a matrix would be cut along the wrong axis.
    """
    # Each sample meets each other sample, as in x - x.dimshuffle(1, 0): replicas get all samples of the other value.
    first = min((value.axis for value in values if value.kind == ROWS), default=None)
    values = [value if value.axis == first else shards.gathered(value) for value in values]
    state = same_rows(shards, node, values)
    values = same_order(shards, node, values)
    like = known_rows(shards, values)
    return [own_rows(shards, value, state.axis, like) for value in values], state


def rows_along(shards: Shards, node: theano.Apply, values: list[Value], axis: int) -> tuple[list[Value], State]:
    """Return the values, whose rows must all lie along one axis in one order, and the state of the rows."""
    state = same_rows(shards, node, values)
    if state.axis != axis:
        shards.refuse(node, OTHER_AXIS % axis)
    return same_order(shards, node, values), state


def only_rows_on(shards: Shards, node: theano.Apply, values: list[Value], axis: int) -> State:
    """Check that the samples of all rows lie along one axis, unmerged, and return the state."""
    if any(value.kind == ROWS and (value.axis != axis or value.state.outer is not None) for value in values):
        shards.refuse(node, OTHER_AXIS % axis)
    return rows(axis)
