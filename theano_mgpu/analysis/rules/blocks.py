"""Several batches one after the other along one axis, such as real and generated samples: blocks of samples."""
from __future__ import annotations

from typing import Any

import theano
import theano.tensor as T

from ..shard_graph import split_axis
from ..shards import Shards
from ..sizes import elements
from ..states import CONSTANT, COUNT, ROWS, Value, rows
from .base import entry_at, is_whole, sliced_axes
from .counts import has_row_each, is_made_for_each, rows_of_each, takes_all

BLOCKS = 'it takes samples of several blocks, or not all of one'


def joined(shards: Shards, node: theano.Apply, values: list[Value]) -> list[Value] | None:
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


def takes_block(shards: Shards, node: theano.Apply, x: Value, entries: list[Any], axis: int) -> bool:
    """Return whether an index may take one of several blocks of samples along an axis, and is known otherwise."""
    entry = entry_at(entries, axis)
    return x.kind == ROWS and x.state.outer is not None and isinstance(entry, slice) and not is_whole(entry) \
        and entry.step in (None, 1) \
        and all(bound in (None, 0) or isinstance(bound, theano.Variable) and shards.value(bound).state.size == COUNT
                for bound in (entry.start, entry.stop)) \
        and are_numbers(entries[:axis] + entries[axis + 1:]) \
        and not (entry.start in (None, 0) and takes_all(node.inputs[0], axis, entry.stop))


def block(shards: Shards, node: theano.Apply, x: Value, entries: list[Any]) -> list[Value]:
    """Return the Value of a basic index that takes one block of rows."""
    axis = sliced_axes(entries, node.inputs[0].ndim).index(x.axis)
    return [_of_block(shards, node, x, entries, lambda part: part, [], rows(axis))]


def write_block(shards: Shards, node: theano.Apply, x: Value, y: Value, entries: list[Any]) -> list[Value]:
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


def split(shards: Shards, node: theano.Apply, x: Value, lengths: Value) -> list[Value] | None:
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


def are_numbers(entries: list[Any]) -> bool:
    """Return whether all of an index is known."""
    return not any(isinstance(part, theano.Variable) for entry in entries for part in
                   ((entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,)))
