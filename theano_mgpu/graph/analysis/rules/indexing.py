"""Indexing, joining and splitting."""
import functools

import theano
import theano.tensor as T
from theano import sparse
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops, subtensor
from theano.tensor.type_other import NoneTypeT, SliceType

from .. import touched_rows
from ..known import are_numbers, entries_of, entry_at, is_scalar_op, is_whole, is_zero, number, slice_of, sliced_axes
from ..reductions import SUM
from ..rows import has_row_each, is_made_for_each, is_total, is_uniform, rows_of_each, takes_all
from ..shards import check_limits, refusal_of, rule
from ..sizes import elements
from ..states import BACKWARDS, CONSTANT, COUNT, LAST, PARTIAL, ROWS, WHOLE, has_rows, partial, rows
from . import base
from .base import aligned, constants, own_rows

MADE_OF_SAMPLES = 'its index is made of samples'
PLACES = 'it picks samples by their place in the batch'
ALIKE = elemwise.DimShuffle, basic.Reshape, basic.Flatten, extra_ops.RepeatOp  # they only move numbers
BLOCKS = 'it takes samples of several blocks, or not all of one'


def _all_along(shards, node, x, entry):
    """Return rows if an entry takes all samples, as in ``x[:y.shape[0]]``, which is checked for each batch."""
    if is_whole(entry):
        return x
    if not isinstance(entry, slice) or not isinstance(entry.stop, theano.Variable) \
            or not is_whole(slice(entry.start, None, entry.step)) or shards.value(entry.stop).state.size != COUNT:
        shards.refuse(node, PLACES)

    def checked(variable, stop):
        right = T.ge(T.as_tensor_variable(stop), shards.whole_length(variable, x.axis))
        return shards.check(node, PLACES, variable, right)
    return shards.make(checked, [x, shards.value(entry.stop)], x.state)


def _turned(node, x):
    """Return rows that an index turns round as a value that still has their first order."""
    only = None if x.state.only == BACKWARDS else BACKWARDS
    return x._replace(state=x.state._replace(only=only, reason=only and refusal_of(node, PLACES)))


@rule(subtensor.Subtensor, of=CONSTANT)
def _subtensor(shards, node, values):
    x, numbers = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)
    if x.state.only == LAST:  # sums that grow with each sample: the last one is a share of the sum over all of them
        if entries_of(node)[:1] != [-1]:
            check_limits(None, [x])
        return shards.apply(node, [x] + numbers, partial())
    if x.kind == PARTIAL:
        return shards.apply(node, [x] + numbers, x.state)
    entries = entries_of(node)
    if x.kind == CONSTANT:
        return _first_joined(shards, node, entries) or shards.constant(node, [x] + numbers)
    if _takes_block(shards, node, x, entries, x.axis):
        state = rows(sliced_axes(entries, node.inputs[0].ndim).index(x.axis))
        return [_of_block(shards, node, x, entries, lambda part: part, [], state)]
    entry = entry_at(entries, x.axis)
    if entry in (0, -1) and is_uniform(shards, node.inputs[0], x.axis):
        return shards.apply(node, [x] + numbers, WHOLE)
    x = _turned(node, x) if entry == slice(None, None, -1) else _all_along(shards, node, x, entry)
    axis = sliced_axes(entries, node.inputs[0].ndim).index(x.axis)
    return shards.apply(node, [x] + numbers, x.state._replace(axis=axis))


def _first_joined(shards, node, entries):
    """Return rows from an index of them with others behind, ``table[concatenate([x, others])][:m]``; None for another.

    That `m` is the number of samples is checked for each batch.
    """
    joined, table = node.inputs[0], None
    if joined.owner and isinstance(joined.owner.op, subtensor.AdvancedSubtensor1):
        table, joined = joined.owner.inputs
    maker, entry = joined.owner, entry_at(entries, 0)
    if not maker or not isinstance(maker.op, basic.Join) or number(maker.inputs[0]) != 0 or len(entries) > 1 \
            or not isinstance(entry, slice) or not isinstance(entry.stop, theano.Variable) \
            or not is_whole(slice(entry.start, None, entry.step)) or not has_row_each(shards, maker.inputs[1], 0):
        return None
    first = maker.inputs[1]
    right = T.eq(T.as_tensor_variable(entry.stop), first.shape[0])
    return [shards.converted(shards.check(node, PLACES, first if table is None else table[first], right))]


@rule(subtensor.IncSubtensor)
def _inc_subtensor(shards, node, values):
    x, y, numbers = values[0], values[1], constants(shards, node, values[2:], MADE_OF_SAMPLES)
    if _adds_to_zero(shards, node, x, y):
        return shards.apply(node, [x, y] + numbers, y.state)
    x, y = shards.wholes([x, y])
    if x.kind == y.kind == CONSTANT:
        return shards.constant(node, [x, y] + numbers)
    entries = entries_of(node, 2)
    axes = sliced_axes(entries, node.inputs[0].ndim)
    shift = len(axes) - node.inputs[1].ndim
    axis, like = (x.axis, x) if x.kind == ROWS else (axes[y.axis + shift], y)
    if axis not in axes:
        shards.refuse(node, PLACES)
    own, entry = axes.index(axis) - shift, entry_at(entries, axis)  # own: the axis of y
    if _takes_block(shards, node, x, entries, axis) and (y.kind == CONSTANT or y.state == rows(own)):
        y = own_rows(shards, y, own)
        write = functools.partial(_written, shards, node, own if y.kind == ROWS else None)
        return [_of_block(shards, node, x, entries, write, [y], x.state)]
    y = base.beside(shards, node, y, own, like)
    if x.kind == CONSTANT and not is_whole(entry):
        return _written_into_zeros(shards, node, x, y, entries, axis)
    x = _all_along(shards, node, x, entry) if x.kind == ROWS else \
        shards.cut(x, axis, like.state.outer, shards.length(y))
    return shards.apply(node, [x, y] + numbers, rows(axis, like.state.outer))


def _written(shards, node, axis, part, y):
    """Write a value into a part of rows, which has to be as long as the value's own rows, if it has an axis of them."""
    if axis is not None:
        right = T.eq(y.shape[axis], part.shape[axis + part.ndim - y.ndim])
        y = shards.check(node, base.OTHER_LENGTHS, y, right)
    return (T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor)(part, y)


def _written_into_zeros(shards, node, x, y, entries, axis):
    """Return each replica's share of the gradient of ``weights[:n]``, which has a row of each sample at its place."""
    entry, others = entries[axis], entries[:axis] + entries[axis + 1:]
    if not is_whole(slice(entry.start, None, entry.step)) \
            or y.state.outer is not None or not is_zero(node.inputs[0]) or not are_numbers(others) \
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


def _adds_to_zero(shards, node, x, y):
    """Return whether a share of a sum is written into zeros, so that the output is a share, too."""
    return y.kind == PARTIAL and y.state.reduction == SUM and x.kind == CONSTANT and is_zero(node.inputs[0]) \
        and shards.stage(x.variable) <= shards.stage(y.variable)


# --- Indexing by arrays ---------------------------------------------------------------------------

class _Indexed:
    """The layout of x[index]: which axes are indexed by arrays, and where the others come to lie.

    As in NumPy, the dimensions of the arrays, broadcast together, replace the indexed axes. They come first where a
    slice lies between the arrays.
    """

    def __init__(self, shards, node, index):
        x = node.inputs[0]
        self.shards, self.node, self.index = shards, node, index
        self.arrays = [i for i, v in enumerate(index) if not isinstance(v.type, SliceType)]
        if not self.arrays or any(isinstance(v.type, NoneTypeT) for v in index):
            shards.refuse(node, PLACES)
        self.array_ndim = max(index[i].ndim for i in self.arrays)
        self.first = self.arrays[0] if self.arrays[-1] - self.arrays[0] + 1 == len(self.arrays) else 0
        others = [i for i in range(x.ndim) if i not in self.arrays]
        self.ndim = len(others) + self.array_ndim
        # Where the axes of x come to lie that are whole.
        self.places = {axis: i if i < self.first else i + self.array_ndim for i, axis in enumerate(others)
                       if axis >= len(index) or is_whole(slice_of(index[axis]))}

    def _shift(self, i):
        """Return how many dimensions the arrays together have ahead of the dimensions of one of them."""
        return self.array_ndim - self.index[i].ndim

    def axis(self, axis):
        """Return where an axis of x comes to lie, which must be whole."""
        if axis not in self.places:
            self.shards.refuse(self.node, PLACES)
        return self.places[axis]

    def source(self, axis):
        """Return the axis of x that comes to lie at this one."""
        sources = [each for each, place in self.places.items() if place == axis]
        return sources[0] if sources else self.shards.refuse(self.node, PLACES)

    def rows(self, values):
        """Return the arrays with the replica's rows, and the state of x[index]."""
        moved = [values[i]._replace(state=values[i].state._replace(axis=values[i].axis + self._shift(i)))
                 for i in self.arrays if values[i].kind == ROWS]
        state = base.same_rows(self.shards, self.node, moved)
        arrays = base.same_order(self.shards, self.node, [values[i] for i in self.arrays])
        like, values = base.known_rows(self.shards, arrays), list(values)
        for i, value in zip(self.arrays, arrays):
            values[i] = own_rows(self.shards, value, state.axis - self._shift(i), like)
        return values, state._replace(axis=self.first + state.axis)

    def beside(self, y, axis, values):
        """Return the replica's rows of a value that is written into x[index], which has as many along an axis."""
        like = base.known_rows(self.shards, values)
        return base.beside(self.shards, self.node, y, axis - (self.ndim - y.variable.ndim), like)

    def axis_of_places(self):
        """Return the axis of x that is indexed by the places of all samples, None if there is none."""
        places = [(i, _places(self.index[i])) for i in self.arrays]
        return next((i for i, each in places if each and self.shards.value(each[0]).state.size == COUNT), None)

    def as_many_as_places(self, x, axis):
        """Return the replica's rows of a CONSTANT that is indexed by sample numbers along an axis."""
        end = self.shards.value(_places(self.index[axis])[0])
        return self.shards.cut(self.shards.make(lambda v, n: self.shards.check(
            self.node, PLACES, v, T.eq(v.shape[axis], n)), [x, end], x.state), axis)

    def own_places(self, x, values):
        """Return the index of ``x[arange(n) * c + labels]``, in which samples pick of their own rows, and its state.

        That each number is the place of a row of the same sample is checked for each batch, whatever `c` is.
        """
        shards, node = self.shards, self.node
        if x.axis not in self.arrays:
            shards.refuse(node, PLACES)
        places, outer = _places(self.index[x.axis]), shards.outer(x)
        if places is None or outer:
            values, state = self.rows(self._with_own_rows(x, values, outer))
        else:
            axis = places[1] + self._shift(x.axis)
            if shards.value(places[0]).state.size != COUNT or any(
                    values[i].kind == ROWS and values[i].state != rows(axis - self._shift(i)) for i in self.arrays):
                shards.refuse(node, PLACES)
            values = list(values)
            if self._is_plain(x.axis, places[0]):
                labels = [values[i] for i in self.arrays if i != x.axis and values[i].variable.ndim == 1]
                values[x.axis] = shards.make(lambda v: T.arange(v.shape[0 if labels else x.axis]), labels[:1] or [x],
                                             rows(axis), like=self.index[x.axis])
                return values, rows(self.first + axis)
            values[x.axis] = own_rows(shards, values[x.axis], places[1])
            values, state = self.rows(values)

        def local(indices, variable, blocks=1):
            each = variable.shape[x.axis] // blocks // shards.own
            numbers = T.cast(indices, 'int64')
            block, place = numbers // (each * shards.total), numbers % (each * shards.total) - shards.first * each
            right = [T.ge(block, 0), T.lt(block, blocks), T.ge(place, 0), T.lt(place, shards.own * each)]
            own = shards.check(node, PLACES, block * shards.own * each + place, *map(T.all, right))
            return T.cast(own, indices.dtype)
        values[x.axis] = shards.make(local, [values[x.axis], x] + outer, values[x.axis].state,
                                     like=self.index[x.axis])
        return values, state

    def _with_own_rows(self, x, values, outer):
        """Return the arrays, at least one of them with the replica's rows."""
        shards = self.shards
        if not _begins_with_places(shards, self.index[x.axis]):
            shards.refuse(self.node, PLACES)
        if any(values[i].kind == ROWS for i in self.arrays):
            return values
        if any(self.index[i].ndim != 1 for i in self.arrays):
            shards.refuse(self.node, PLACES)
        # Each sample of each block has the same number of rows.
        checked = shards.make(lambda v, n=1: shards.check(
            self.node, PLACES, v, T.eq(v.shape[0] % (n * shards.total), 0)), [values[x.axis]] + outer,
            values[x.axis].state)
        return values[:x.axis] + [shards.cut(checked, 0, x.state.outer)] + values[x.axis + 1:]

    def _is_plain(self, axis, end):
        """Return whether this is ``x[arange(N), labels]``, all with one row a sample.

        The index then stays as it is, for Theano knows how to compute its log and gradient where x is a softmax: a
        cross-entropy that does not overflow.
        """
        return isinstance(self.index[axis].owner.op, basic.ARange) and is_total(self.shards, end) \
            and has_row_each(self.shards, self.node.inputs[0], axis) \
            and all(i == axis or self.index[i].ndim == 1 and has_row_each(self.shards, self.index[i], 0)
                    for i in self.arrays)


def _begins_with_places(shards, variable):
    """Return whether an index is a sum with the places of all samples, each times a number, in it."""
    node = variable.owner
    if not node:
        return False
    if isinstance(node.op, basic.ARange):
        return number(node.inputs[0]) == 0 and shards.value(node.inputs[1]).state.size == COUNT
    if is_scalar_op(node, scalar.Add, scalar.Mul):
        return any(_begins_with_places(shards, v) for v in node.inputs)
    return (isinstance(node.op, ALIKE) or is_scalar_op(node, scalar.Cast, scalar.Sub)) \
        and _begins_with_places(shards, node.inputs[0])


def _places(variable):
    """Return the end n and the axis of an array whose elements are 0, 1, 2 … n - 1 along this axis; None of others."""
    node = variable.owner
    if not node:
        return None
    if isinstance(node.op, basic.ARange):
        return (node.inputs[1], 0) if number(node.inputs[0]) == 0 and number(node.inputs[2]) == 1 else None
    if is_scalar_op(node, scalar.Switch):
        condition = node.inputs[0]
        while condition.owner and isinstance(condition.owner.op, elemwise.DimShuffle):
            condition, = condition.owner.inputs
        chosen = None if condition.ndim else number(condition)
        return None if chosen is None else _places(node.inputs[1 if chosen else 2])
    if not isinstance(node.op, (elemwise.DimShuffle, basic.Reshape)):
        return None
    places, lengthy = _places(node.inputs[0]), [i for i, is_one in enumerate(variable.broadcastable) if not is_one]
    alike = len(lengthy) == node.inputs[0].broadcastable.count(False) == 1
    return (places[0], lengthy[0]) if places and alike else None


@rule(subtensor.AdvancedSubtensor1, subtensor.AdvancedSubtensor, of=ROWS)
def _advanced_subtensor(shards, node, values):
    x, index = values[0], values[1:]
    indexed = _Indexed(shards, node, node.inputs[1:])
    if x.kind == CONSTANT:
        index, state = indexed.rows(index)
    elif x.axis not in indexed.arrays and not has_rows(index):
        state = x.state._replace(axis=indexed.axis(x.axis))
    else:
        index, state = indexed.own_places(x, index)
    return shards.apply(node, [x] + index, state)


@rule(sparse.GetItemList, of=ROWS)
def _rows_of_sparse(shards, node, values):
    base.refuse_rows(shards, node, values[:1], 'other samples of the matrix would be asked for')
    return shards.apply(node, values, values[1].state)


@rule(sparse.GetItem2d, of=ROWS)
def _slices_of_sparse(shards, node, values):
    x, *bounds = values
    if has_rows(bounds) or any(getattr(v, 'data', v) is not None for v in node.inputs[1 + 3 * x.axis:4 + 3 * x.axis]):
        shards.refuse(node, 'it slices along the samples')
    return shards.apply(node, values, x.state)


@rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)
def _advanced_inc_subtensor(shards, node, values):
    x, y, index = values[0], values[1], shards.wholes(values[2:])
    constant = not has_rows(index)
    if constant and _adds_to_zero(shards, node, x, y):
        return shards.apply(node, [x, y] + index, y.state)
    x, y = shards.wholes([x, y])
    if constant and x.kind == y.kind == CONSTANT:
        return shards.constant(node, [x, y] + index)
    indexed = _Indexed(shards, node, node.inputs[2:])
    own = x.axis if x.kind == ROWS else indexed.axis_of_places()
    if own in indexed.arrays:
        # One-hot codes, and the gradient of x[arange(n), labels]: each sample writes into its own row.
        x = indexed.as_many_as_places(x, own) if x.kind == CONSTANT else x
        index, state = indexed.own_places(x, index)
        return shards.apply(node, [x, indexed.beside(y, state.axis, index)] + index, x.state)
    if constant:  # along axes other than the axis of the samples
        state = x.state if x.kind == ROWS else y.state._replace(
            axis=indexed.source(y.axis + indexed.ndim - node.inputs[1].ndim))
        x = shards.cut(x, state.axis, state.outer, shards.length(y)) if x.kind == CONSTANT else x
        return shards.apply(node, [x, indexed.beside(y, indexed.axis(state.axis), [x, y])] + index, state)
    if x.kind == ROWS:
        shards.refuse(node, PLACES)
    if node.op.set_instead_of_inc or not is_zero(node.inputs[0]):
        # Several samples may name one place: then their order counts, or the value that was there before.
        output, = shards.constant(node, [x] + list(map(shards.gathered, [y] + index)))
        # The result has the lengths of x, and its numbers are not lengths.
        return [output._replace(state=x.state) if node.outputs[0].dtype.startswith('float') else output]
    # Rows are added into zeros, at places that the samples name: a share of a sum, such as an embedding's gradient.
    index, state = indexed.rows(index)
    given = [x, indexed.beside(y, state.axis, index)] + index
    return [touched_rows.noted(shards, node, given, *shards.apply(node, given, partial()))]


# --- Joining and splitting -----------------------------------------------------------------------

@rule(basic.Join, of=ROWS, compares_lengths=True)
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
    base.refuse_rows(shards, node, values[1:], 'its lengths are made of samples')
    if axis is None or int(axis) % node.inputs[0].ndim == x.axis:
        sizes = elements(node.inputs[2], values[2].state.size) or ()
        if axis is None or x.state.outer is None or COUNT not in sizes:
            shards.refuse(node, 'it splits the samples')
        lengths, each = node.inputs[2], node.inputs[2][sizes.index(COUNT)]
        blocks = shards.check(node, BLOCKS, node.inputs[0], T.all(T.eq(lengths, each)))
        index = (slice(None),) * x.axis
        return [shards.converted(T.patternbroadcast(
            blocks[index + (slice(i * each if i else None, (i + 1) * each),)], output.broadcastable))
            for i, output in enumerate(node.outputs)]
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
        and are_numbers(entries[:axis] + entries[axis + 1:]) \
        and not (entry.start in (None, 0) and takes_all(node.inputs[0], axis, entry.stop))


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
