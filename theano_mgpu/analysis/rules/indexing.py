"""Indexing by numbers and slices, joining and splitting."""
import theano
import theano.tensor as T
from theano.tensor import basic, extra_ops, subtensor

from ..reductions import SUM
from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, COUNT, LAST, PARTIAL, ROWS, WHOLE, partial, rows
from . import blocks, maps
from .base import aligned, constants, is_zero, known, same_order, wholes
from .counts import takes_all
from .shapes import whole_length
from .uniform import is_uniform

MADE_OF_SAMPLES = 'its index is made of samples'
PLACES = 'it picks samples by their place in the batch'


def _entries(node, skip):
    """Entries of a basic index, numbers where they are known."""
    found = []
    for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list):
        if isinstance(entry, slice):
            found.append(slice(*[known(part) for part in (entry.start, entry.stop, entry.step)]))
        else:
            found.append(known(entry))
    return found


def is_whole(entry):
    return isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None and entry.step in (None, 1)


def _all_along(shards, node, x, entries, axis):
    """Rows of which an index takes all samples, as ``x[:y.shape[0]]`` may; this is then checked for each batch."""
    entry = entries[axis] if axis < len(entries) else slice(None)
    if is_whole(entry):
        return x
    if not isinstance(entry, slice) or not isinstance(entry.stop, theano.Variable) \
            or not is_whole(slice(entry.start, None, entry.step)) or shards.value(entry.stop).state.size != COUNT:
        shards.refuse(node, PLACES)

    def checked(variable, stop):
        right = T.ge(T.as_tensor_variable(stop), whole_length(shards, variable, axis))
        return shards.check(node, PLACES, variable, right)
    return shards.make(checked, [x, shards.value(entry.stop)], x.state)


def _takes_block(shards, node, x, entries, axis):
    """Whether an index takes one of several blocks of samples, and otherwise is known."""
    return axis < len(entries) and not is_whole(entries[axis]) and blocks.is_block(shards, x, entries[axis]) \
        and blocks.are_numbers(entries[:axis] + entries[axis + 1:]) \
        and not (entries[axis].start in (None, 0) and takes_all(node.inputs[0], axis, entries[axis].stop))


@rule(subtensor.Subtensor)
def _subtensor(shards, node, values):
    x, numbers = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)
    if x.state.only == LAST:
        return maps.last(shards, node, x, numbers, _entries(node, 1))
    if x.kind == PARTIAL:
        return shards.apply(node, [x] + numbers, x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x] + numbers)
    entries = _entries(node, 1)
    if _takes_block(shards, node, x, entries, x.axis):
        return blocks.block(shards, node, x, entries)
    if entries[x.axis:x.axis + 1] in ([0], [-1]) and is_uniform(shards, node.inputs[0], x.axis):
        return shards.apply(node, [x] + numbers, WHOLE)
    if entries[x.axis:x.axis + 1] == [slice(None, None, -1)]:
        x = maps.turned(shards, node, x, PLACES)
    else:
        x = _all_along(shards, node, x, entries, x.axis)
    axis = x.axis - sum(not isinstance(entry, slice) for entry in entries[:x.axis])
    return shards.apply(node, [x] + numbers, x.state._replace(axis=axis))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(shards, node, values):
    x, y, numbers = values[0], values[1], constants(shards, node, values[2:], MADE_OF_SAMPLES)
    if adds_to_zero(node, x, y):
        return shards.apply(node, [x, y] + numbers, y.state)
    x, y = wholes(shards, [x, y])
    if x.kind == y.kind == CONSTANT:
        return shards.constant(node, [x, y] + numbers)
    entries = _entries(node, 2)
    kept = [i for i, entry in enumerate(entries) if isinstance(entry, slice)]
    kept += range(len(entries), node.inputs[0].ndim)
    shift = len(kept) - node.inputs[1].ndim
    if x.kind == ROWS:
        axis, outer = x.axis, x.state.outer
    else:
        axis, outer = kept[y.axis + shift], y.state.outer
    if axis not in kept:
        shards.refuse(node, PLACES)
    own = kept.index(axis) - shift  # of y
    if _takes_block(shards, node, x, entries, axis) and (y.kind == CONSTANT or y.state == rows(own)):
        if y.kind == CONSTANT and own >= 0 and not node.inputs[1].type.broadcastable[own]:
            y = shards.cut(y, own, widens=True)
        return blocks.write_block(shards, node, x, y, entries)
    if y.kind == ROWS and (y.axis != own or (y.state.outer is None) != (outer is None)):
        shards.refuse(node, 'samples lie along different axes of its inputs')
    if x.kind == CONSTANT and axis < len(entries) and not is_whole(entries[axis]):
        return _written_into_zeros(shards, node, x, y, entries, axis)
    x = shards.cut(x, axis, outer) if x.kind == CONSTANT else _all_along(shards, node, x, entries, axis)
    x, y = same_order(shards, node, [x, y])
    if y.kind == CONSTANT and own >= 0 and not node.inputs[1].type.broadcastable[own]:
        y = shards.cut(y, own, outer)
    return shards.apply(node, [x, y] + numbers, rows(axis, outer))


def _written_into_zeros(shards, node, x, y, entries, axis):
    """The gradient of ``weights[:n]``, which samples have rows of by their place: each replica has a share of it."""
    entry, others = entries[axis], entries[:axis] + entries[axis + 1:]
    if not is_whole(entry if not isinstance(entry, slice) else slice(entry.start, None, entry.step)) \
            or y.state.outer is not None or not is_zero(node.inputs[0]) or not blocks.are_numbers(others) \
            or node.outputs[0].dtype == 'bool':
        shards.refuse(node, PLACES)
    given = [shards.value(entry.stop)] if isinstance(entry.stop, theano.Variable) else []

    def local(variable, y_own, *stop):
        end, length = T.as_tensor_variable(stop[0] if stop else entry.stop), variable.shape[axis]
        each = y_own.shape[y.axis] // shards.own
        right = T.eq(T.switch(T.lt(end, 0), end + length, T.minimum(end, length)), each * shards.total)
        first = shards.check(node, PLACES, shards.first * each, right)
        index = [slice(first, first + each * shards.own) if i == axis else part for i, part in enumerate(entries)]
        return (T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor)(variable[tuple(index)], y_own)
    return [shards.make(local, [x, y] + given, partial(), like=node.outputs[0])]


def adds_to_zero(node, x, y):
    """Whether a share of a sum is written into zeros, so that the whole is a share, too."""
    return y.kind == PARTIAL and y.state.reduction == SUM and x.kind == CONSTANT and is_zero(node.inputs[0]) \
        and x.stage <= y.stage


@rule(basic.Join)
def _join(shards, node, values):
    axis, values = number(node.inputs[0]), [values[0]] + wholes(shards, values[1:])
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    parts, state = aligned(shards, node, values[1:])
    if axis is None or int(axis) % node.outputs[0].ndim == state.axis:
        found = blocks.joined(shards, node, values) if axis is not None else None
        return found or shards.refuse(node, 'it joins along the samples')
    return shards.apply(node, values[:1] + parts, state)


@rule(basic.Split)
def _split(shards, node, values):
    x, axis = wholes(shards, values[:1])[0], number(node.inputs[1])
    if x.kind != ROWS:
        return shards.constant(node, [x] + wholes(shards, values[1:]))
    if axis is None or int(axis) % node.inputs[0].ndim == x.axis:
        found = blocks.split(shards, node, x, shards.whole(values[2])) if axis is not None else None
        return found or shards.refuse(node, 'it splits the samples')
    return shards.apply(node, [x] + wholes(shards, values[1:]), x.state)


@rule(extra_ops.RepeatOp)
def _repeat(shards, node, values):
    x, times = wholes(shards, values)
    if x.kind == times.kind == CONSTANT:
        return shards.constant(node, [x, times])
    if x.kind != ROWS or times.kind != CONSTANT or node.op.axis is None or node.inputs[1].ndim:
        shards.refuse(node, PLACES)
    return shards.apply(node, [x, times], x.state)
