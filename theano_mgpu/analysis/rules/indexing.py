"""Indexing by numbers and slices, joining and splitting."""
import theano
import theano.tensor as T
from theano.tensor import basic, extra_ops, subtensor

from ..reductions import SUM
from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, COUNT, LAST, PARTIAL, ROWS, WHOLE, partial, rows
from . import blocks, maps
from .base import (
    DIFFERENT_AXES,
    aligned,
    constants,
    entries_of,
    entry_at,
    is_whole,
    is_zero,
    own_rows,
    refuse_rows,
    same_order,
    sliced_axes,
)
from .shapes import whole_length
from .uniform import is_uniform

MADE_OF_SAMPLES = 'its index is made of samples'
PLACES = 'it picks samples by their place in the batch'


def _all_along(shards, node, x, entry):
    """Return rows if an entry takes all samples, as in ``x[:y.shape[0]]``, which is checked for each batch."""
    if is_whole(entry):
        return x
    if not isinstance(entry, slice) or not isinstance(entry.stop, theano.Variable) \
            or not is_whole(slice(entry.start, None, entry.step)) or shards.value(entry.stop).state.size != COUNT:
        shards.refuse(node, PLACES)

    def checked(variable, stop):
        right = T.ge(T.as_tensor_variable(stop), whole_length(shards, variable, x.axis))
        return shards.check(node, PLACES, variable, right)
    return shards.make(checked, [x, shards.value(entry.stop)], x.state)


@rule(subtensor.Subtensor)
def _subtensor(shards, node, values):
    x, numbers = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)
    if x.state.only == LAST:
        return maps.last(shards, node, x, numbers, entries_of(node))
    if x.kind == PARTIAL:
        return shards.apply(node, [x] + numbers, x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x] + numbers)
    entries = entries_of(node)
    if blocks.takes_block(shards, node, x, entries, x.axis):
        return blocks.block(shards, node, x, entries)
    entry = entry_at(entries, x.axis)
    if entry in (0, -1) and is_uniform(shards, node.inputs[0], x.axis):
        return shards.apply(node, [x] + numbers, WHOLE)
    x = maps.turned(shards, node, x, PLACES) if entry == slice(None, None, -1) else _all_along(shards, node, x, entry)
    axis = sliced_axes(entries, node.inputs[0].ndim).index(x.axis)
    return shards.apply(node, [x] + numbers, x.state._replace(axis=axis))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(shards, node, values):
    x, y, numbers = values[0], values[1], constants(shards, node, values[2:], MADE_OF_SAMPLES)
    if adds_to_zero(node, x, y):
        return shards.apply(node, [x, y] + numbers, y.state)
    x, y = shards.wholes([x, y])
    if x.kind == y.kind == CONSTANT:
        return shards.constant(node, [x, y] + numbers)
    entries = entries_of(node, 2)
    axes = sliced_axes(entries, node.inputs[0].ndim)
    shift = len(axes) - node.inputs[1].ndim
    axis, outer = (x.axis if x.kind == ROWS else axes[y.axis + shift]), (x if x.kind == ROWS else y).state.outer
    if axis not in axes:
        shards.refuse(node, PLACES)
    own, entry = axes.index(axis) - shift, entry_at(entries, axis)  # own: the axis of y
    if blocks.takes_block(shards, node, x, entries, axis) and (y.kind == CONSTANT or y.state == rows(own)):
        return blocks.write_block(shards, node, x, own_rows(shards, y, own), entries)
    if y.kind == ROWS and (y.axis != own or (y.state.outer is None) != (outer is None)):
        shards.refuse(node, DIFFERENT_AXES)
    if x.kind == CONSTANT and not is_whole(entry):
        return _written_into_zeros(shards, node, x, y, entries, axis)
    x = shards.cut(x, axis, outer) if x.kind == CONSTANT else _all_along(shards, node, x, entry)
    x, y = same_order(shards, node, [x, y])
    return shards.apply(node, [x, own_rows(shards, y, own, outer, widens=False)] + numbers, rows(axis, outer))


def _written_into_zeros(shards, node, x, y, entries, axis):
    """Return each replica's share of the gradient of ``weights[:n]``, which has a row of each sample at its place."""
    entry, others = entries[axis], entries[:axis] + entries[axis + 1:]
    if not is_whole(slice(entry.start, None, entry.step)) \
            or y.state.outer is not None or not is_zero(node.inputs[0]) or not blocks.are_numbers(others) \
            or node.outputs[0].dtype == 'bool':
        shards.refuse(node, PLACES)

    def local(variable, y_own, *stop):
        end, length = T.as_tensor_variable(stop[0] if stop else entry.stop), variable.shape[axis]
        each = y_own.shape[y.axis] // shards.own
        right = T.eq(T.switch(T.lt(end, 0), end + length, T.minimum(end, length)), each * shards.total)
        first = shards.check(node, PLACES, shards.first * each, right)
        index = entries[:axis] + [slice(first, first + each * shards.own)] + entries[axis + 1:]
        return (T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor)(variable[tuple(index)], y_own)
    stops = [shards.value(entry.stop)] if isinstance(entry.stop, theano.Variable) else []
    return [shards.make(local, [x, y] + stops, partial(), like=node.outputs[0])]


def adds_to_zero(node, x, y):
    """Return whether a share of a sum is written into zeros, so that the output is a share, too."""
    return y.kind == PARTIAL and y.state.reduction == SUM and x.kind == CONSTANT and is_zero(node.inputs[0]) \
        and x.stage <= y.stage


@rule(basic.Join, of=ROWS)
def _join(shards, node, values):
    axis = number(node.inputs[0])
    parts, state = aligned(shards, node, values[1:])
    if axis is None or int(axis) % node.outputs[0].ndim == state.axis:
        joined = blocks.joined(shards, node, values) if axis is not None else None
        return joined or shards.refuse(node, 'it joins along the samples')
    return shards.apply(node, values[:1] + parts, state)


@rule(basic.Split, of=ROWS)
def _split(shards, node, values):
    x, axis = values[0], number(node.inputs[1])
    refuse_rows(shards, node, values[1:], 'its lengths are made of samples')
    if axis is None or int(axis) % node.inputs[0].ndim == x.axis:
        parts = blocks.split(shards, node, x, values[2]) if axis is not None else None
        return parts or shards.refuse(node, 'it splits the samples')
    return shards.apply(node, values, x.state)


@rule(extra_ops.RepeatOp, of=ROWS)
def _repeat(shards, node, values):
    x, times = values
    if x.kind != ROWS or times.kind != CONSTANT or node.op.axis is None or node.inputs[1].ndim:
        shards.refuse(node, PLACES)
    return shards.apply(node, values, x.state)
