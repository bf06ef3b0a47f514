"""Several batches one after the other along one axis, such as real and generated samples: blocks of samples."""
import theano
import theano.tensor as T

from ..shard_graph import split_axis
from ..sizes import elements
from ..states import CONSTANT, COUNT, ROWS, rows
from .counts import rows_of_each
from .rows import has_row_each, is_made_for_each

BLOCKS = 'it takes samples of several blocks, or not all of one'


def joined(shards, node, values):
    """What has a row for each sample, or as many as the others, one after the other; None of something else."""
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


def is_block(shards, x, entry):
    """Whether an entry of an index may take one block of rows, of which each has the samples in their order."""
    if x.kind != ROWS or x.state.outer is None or not isinstance(entry, slice) or entry.step not in (None, 1):
        return False
    return all(bound in (None, 0) or isinstance(bound, theano.Variable) and shards.value(bound).state.size == COUNT
               for bound in (entry.start, entry.stop))


def block(shards, node, x, entries):
    """The Value of a basic index that takes one block of rows."""
    entry = entries[x.axis]

    def local(variable, blocks, *bounds):
        return variable[_index(entries, x.axis, _place(shards, node, variable, x.axis, blocks, entry, bounds))]
    return [shards.make(local, _given(shards, x, entry), rows(_axis_after(entries, x.axis)), like=node.outputs[0])]


def write_block(shards, node, x, y, entries):
    """The Value of what is written into one block of rows."""
    entry = entries[x.axis]
    write = T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor

    def local(y, variable, blocks, *bounds):
        place = _place(shards, node, variable, x.axis, blocks, entry, bounds)
        return write(variable[_index(entries, x.axis, place)], y)
    return [shards.make(local, [y] + _given(shards, x, entry), x.state, like=node.outputs[0])]


def split(shards, node, x, lengths):
    """The Values of a Split of which each part is a block; None where they may be others."""
    found = elements(node.inputs[2], lengths.state.size)
    if x.state.outer is None or found is None or COUNT not in found:
        return None

    def part(i):
        def local(variable, blocks, lengths):
            apart = split_axis(variable, x.axis, blocks)
            whole = apart.shape[x.axis + 1] // shards.own * shards.total
            apart = shards.check(node, BLOCKS, apart, T.all(T.eq(lengths, whole)), T.eq(blocks, len(node.outputs)))
            return apart[(slice(None),) * x.axis + (i,)]
        return shards.make(local, [x, shards.length(x.state.outer), lengths], rows(x.axis), like=node.outputs[i])
    return [part(i) for i in range(len(node.outputs))]


def _given(shards, x, entry):
    bounds = [shards.value(bound) for bound in (entry.start, entry.stop) if isinstance(bound, theano.Variable)]
    return [x, shards.length(x.state.outer)] + bounds


def _place(shards, node, variable, axis, blocks, entry, bounds):
    """The replica's part of the block that a slice takes, as a slice."""
    bounds, own = iter(bounds), variable.shape[axis] // blocks
    whole = own // shards.own * shards.total

    def bound(given, default):
        if not isinstance(given, theano.Variable):
            return T.constant(0, dtype='int64') if given == 0 else default
        number = T.cast(T.as_tensor_variable(next(bounds)), 'int64')
        return T.switch(T.lt(number, 0), number + whole * blocks, T.minimum(number, whole * blocks))
    start, stop = bound(entry.start, T.constant(0, dtype='int64')), bound(entry.stop, whole * blocks)
    right = [T.ge(start, 0), T.eq(start % whole, 0), T.eq(stop - start, whole)]
    first = shards.check(node, BLOCKS, start // whole * own, *right)
    return slice(first, first + own)


def _index(entries, axis, place):
    return tuple(place if i == axis else entry for i, entry in enumerate(entries))


def _axis_after(entries, axis):
    return axis - sum(not isinstance(entry, slice) for entry in entries[:axis])


def are_numbers(entries):
    """Whether all of an index is known."""
    parts = [part for entry in entries for part in
             ((entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (entry,))]
    return not any(isinstance(part, theano.Variable) for part in parts)
