"""Indexing by numbers and slices, joining and splitting."""
import theano
import theano.tensor as T
from theano.tensor import basic, extra_ops, subtensor

from ..reductions import SUM
from ..shard_graph import split_axis
from ..shards import rule
from ..sizes import elements, number
from ..states import CONSTANT, COUNT, LAST, PARTIAL, ROWS, WHOLE, has_rows, partial, rows
from .base import aligned, beside, constants, entries_of, entry_at, is_whole, is_zero, own_rows, sliced_axes
from .control_flow import last, turned
from .rows import has_row_each, is_made_for_each, is_uniform, rows_of_each, takes_all
from .shapes import whole_length

MADE_OF_SAMPLES = 'its index is made of samples'
PLACES = 'it picks samples by their place in the batch'
BLOCKS = 'it takes samples of several blocks, or not all of one'


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
        return last(shards, node, x, numbers, entries_of(node))
    if x.kind == PARTIAL:
        return shards.apply(node, [x] + numbers, x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x] + numbers)
    entries = entries_of(node)
    if _takes_block(shards, node, x, entries, x.axis):
        return _block(shards, node, x, entries)
    entry = entry_at(entries, x.axis)
    if entry in (0, -1) and is_uniform(shards, node.inputs[0], x.axis):
        return shards.apply(node, [x] + numbers, WHOLE)
    x = turned(shards, node, x, PLACES) if entry == slice(None, None, -1) else _all_along(shards, node, x, entry)
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
    if _takes_block(shards, node, x, entries, axis) and (y.kind == CONSTANT or y.state == rows(own)):
        return _write_block(shards, node, x, own_rows(shards, y, own), entries)
    y = beside(shards, node, y, own, outer, widens=False)
    if x.kind == CONSTANT and not is_whole(entry):
        return _written_into_zeros(shards, node, x, y, entries, axis)
    x = shards.cut(x, axis, outer) if x.kind == CONSTANT else _all_along(shards, node, x, entry)
    return shards.apply(node, [x, y] + numbers, rows(axis, outer))


def _written_into_zeros(shards, node, x, y, entries, axis):
    """Return each replica's share of the gradient of ``weights[:n]``, which has a row of each sample at its place."""
    entry, others = entries[axis], entries[:axis] + entries[axis + 1:]
    if not is_whole(slice(entry.start, None, entry.step)) \
            or y.state.outer is not None or not is_zero(node.inputs[0]) or not _are_numbers(others) \
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
        joined = _joined_blocks(shards, node, values) if axis is not None else None
        return joined or shards.refuse(node, 'it joins along the samples')
    return shards.apply(node, values[:1] + parts, state)


@rule(basic.Split, of=ROWS)
def _split(shards, node, values):
    x, axis = values[0], number(node.inputs[1])
    if has_rows(values[1:]):
        shards.refuse(node, 'its lengths are made of samples')
    if axis is None or int(axis) % node.inputs[0].ndim == x.axis:
        parts = _split_blocks(shards, node, x, values[2]) if axis is not None else None
        return parts or shards.refuse(node, 'it splits the samples')
    return shards.apply(node, values, x.state)


@rule(extra_ops.RepeatOp, of=ROWS)
def _repeat(shards, node, values):
    x, times = values
    if x.kind != ROWS or times.kind != CONSTANT or node.op.axis is None or node.inputs[1].ndim:
        shards.refuse(node, PLACES)
    return shards.apply(node, values, x.state)


# --- Several batches one after the other along one axis, such as real and generated samples: blocks of samples -----

def _joined_blocks(shards, node, values):
    """Join values that all have as many rows of each sample along the axis; None where they may have not."""
    axis = next(value.axis for value in values if value.kind == ROWS)
    alike, parts = len({rows_of_each(shards, v, axis) for v in node.inputs[1:]}) == 1, []
    for value, variable in zip(values[1:], node.inputs[1:]):
        if value.kind == CONSTANT and is_made_for_each(shards, variable, axis):
            value = shards.cut(shards.make(lambda v: shards.check(
                node, BLOCKS, v, T.eq(v.shape[axis], shards.total)), [value], value.state), axis)
        elif value.state != rows(axis) or not alike and not has_row_each(shards, variable, axis):
            return None
        parts.append(value)
    return shards.apply(node, values[:1] + parts, rows(axis, T.constant(len(parts), dtype='int64')))


def _takes_block(shards, node, x, entries, axis):
    """Return whether an index may take one of several blocks of samples along an axis, and is known otherwise."""
    entry = entry_at(entries, axis)
    return x.kind == ROWS and x.state.outer is not None and isinstance(entry, slice) and not is_whole(entry) \
        and entry.step in (None, 1) \
        and all(bound in (None, 0) or isinstance(bound, theano.Variable) and shards.value(bound).state.size == COUNT
                for bound in (entry.start, entry.stop)) \
        and _are_numbers(entries[:axis] + entries[axis + 1:]) \
        and not (entry.start in (None, 0) and takes_all(node.inputs[0], axis, entry.stop))


def _block(shards, node, x, entries):
    """Return the Value of a basic index that takes one block of rows."""
    axis = sliced_axes(entries, node.inputs[0].ndim).index(x.axis)
    return [_of_block(shards, node, x, entries, lambda part: part, [], rows(axis))]


def _write_block(shards, node, x, y, entries):
    """Return the Value of rows of which one block is written."""
    write = T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor
    return [_of_block(shards, node, x, entries, write, [y], x.state)]


def _of_block(shards, node, x, entries, function, others, state):
    """Return the Value of a function of the block that an index takes, and of other values."""
    axis, entry = x.axis, entries[x.axis]

    def local(variable, blocks, *more):
        own = variable.shape[axis] // blocks
        whole, bounds = own // shards.own * shards.total, iter(more[len(others):])

        def bound(part, default):
            if not isinstance(part, theano.Variable):
                return T.constant(0, dtype='int64') if part == 0 else default
            number = T.cast(T.as_tensor_variable(next(bounds)), 'int64')
            return T.switch(T.lt(number, 0), number + whole * blocks, T.minimum(number, whole * blocks))
        start, stop = bound(entry.start, T.constant(0, dtype='int64')), bound(entry.stop, whole * blocks)
        right = [T.ge(start, 0), T.eq(start % whole, 0), T.eq(stop - start, whole)]
        first = shards.check(node, BLOCKS, start // whole * own, *right)
        index = entries[:axis] + [slice(first, first + own)] + entries[axis + 1:]
        return function(variable[tuple(index)], *more[:len(others)])
    bounds = [shards.value(bound) for bound in (entry.start, entry.stop) if isinstance(bound, theano.Variable)]
    return shards.make(local, [x] + shards.outer(x) + others + bounds, state, like=node.outputs[0])


def _split_blocks(shards, node, x, lengths):
    """Return the Values of a Split into blocks; None where its parts may be others."""
    sizes = elements(node.inputs[2], lengths.state.size)
    if x.state.outer is None or sizes is None or COUNT not in sizes:
        return None

    def parts(variable, blocks, lengths):
        apart = split_axis(variable, x.axis, blocks)
        whole = apart.shape[x.axis + 1] // shards.own * shards.total
        apart = shards.check(node, BLOCKS, apart, T.all(T.eq(lengths, whole)), T.eq(blocks, len(node.outputs)))
        return [T.patternbroadcast(apart[(slice(None),) * x.axis + (i,)], output.broadcastable)
                for i, output in enumerate(node.outputs)]
    return shards.make_all(parts, [x] + shards.outer(x) + [lengths], [rows(x.axis)] * len(node.outputs))


def _are_numbers(entries):
    """Return whether all of an index is known."""
    return not any(isinstance(part, theano.Variable) for entry in entries for part in
                   ((entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,)))
