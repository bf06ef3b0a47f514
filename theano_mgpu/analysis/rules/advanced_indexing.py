"""Indexing by arrays."""
import theano
import theano.tensor as T
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops, subtensor
from theano.tensor.type_other import NoneTypeT, SliceType

from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, COUNT, ROWS, partial, rows
from .base import in_order, is_zero, known, same_order, same_rows, wholes
from .indexing import PLACES, adds_to_zero, is_whole
from .rows import has_row_each, is_total

ALIKE = elemwise.DimShuffle, basic.Reshape, basic.Flatten, extra_ops.RepeatOp  # the numbers are those of the input


class _Indexed:
    """What x[index] looks like: which axes are indexed by arrays, and where the others come to lie.

    As in NumPy, the dimensions that the arrays have together stand for them, ahead of all others where a slice lies
    between the arrays.
    """

    def __init__(self, shards, node, index):
        x = node.inputs[0]
        self.shards, self.node, self.index = shards, node, index
        self.arrays = [i for i, v in enumerate(index) if not isinstance(v.type, SliceType)]
        if not self.arrays or any(isinstance(v.type, NoneTypeT) for v in index):
            shards.refuse(node, PLACES)
        self.array_ndim = max(index[i].ndim for i in self.arrays)
        self.first = self.arrays[0] if self.arrays[-1] - self.arrays[0] + 1 == len(self.arrays) else 0
        self.others = [i for i in range(x.ndim) if i not in self.arrays]
        self.ndim = len(self.others) + self.array_ndim

    def axis(self, axis):
        """Where an axis of x comes to lie, of which nothing may be left out."""
        if axis in self.arrays or axis < len(self.index) and not is_whole(_slice_of(self.index[axis])):
            self.shards.refuse(self.node, PLACES)
        place = self.others.index(axis)
        return place if place < self.first else place + self.array_ndim

    def source(self, axis):
        """The axis of x that comes to lie there."""
        for each in self.others:
            if (each >= len(self.index) or is_whole(_slice_of(self.index[each]))) and self.axis(each) == axis:
                return each
        return self.shards.refuse(self.node, PLACES)

    def rows(self, values):
        """The arrays with the replica's rows, and where and how these lie in x[index]."""
        def shift(i):
            return self.array_ndim - self.index[i].ndim
        found = [values[i]._replace(state=values[i].state._replace(axis=values[i].axis + shift(i)))
                 for i in self.arrays if values[i].kind == ROWS]
        state = same_rows(self.shards, self.node, found)
        values = same_order(self.shards, self.node, values)
        values = [_cut(self.shards, value, state.axis - shift(i), state.outer) if i in self.arrays else value
                  for i, value in enumerate(values)]
        return values, state._replace(axis=self.first + state.axis)

    def beside(self, y, state):
        """The rows of what is written into x[index], whose samples lie so."""
        axis = state.axis - (self.ndim - y.variable.ndim)
        if y.kind == ROWS and (y.axis != axis or (y.state.outer is None) != (state.outer is None)):
            self.shards.refuse(self.node, 'samples lie along different axes of its inputs')
        return _cut(self.shards, in_order(self.shards, self.node, y, state.outer), axis, state.outer)

    def axis_of_places(self):
        """The axis of x that is indexed by the places of all samples, None if there is none."""
        for i in self.arrays:
            found = _places(self.index[i])
            if found and self.shards.value(found[0]).state.size == COUNT:
                return i
        return None

    def as_many_as_places(self, x, axis):
        """The replica's rows of a CONSTANT, of which each place is that of a row."""
        end = self.shards.value(_places(self.index[axis])[0])
        return self.shards.cut(self.shards.make(lambda v, n: self.shards.check(
            self.node, PLACES, v, T.eq(v.shape[axis], n)), [x, end], x.state), axis)

    def own_places(self, x, values):
        """The index of ``x[arange(n), labels]``, in which each sample picks of its own row, and where its rows lie."""
        shards, node = self.shards, self.node
        if x.axis not in self.arrays:
            shards.refuse(node, PLACES)
        found = _places(self.index[x.axis])
        if found is None or x.state.outer is not None:
            return self._in_own_rows(x, values)
        end, axis = shards.value(found[0]), found[1] + self.array_ndim - self.index[x.axis].ndim
        if end.state.size != COUNT:
            shards.refuse(node, PLACES)
        for i in self.arrays:
            own = axis - self.array_ndim + self.index[i].ndim
            if values[i].kind == ROWS and values[i].state != rows(own):
                shards.refuse(node, PLACES)
            values = values[:i] + [_cut(shards, values[i], own, None)] + values[i + 1:]

        if self._is_plain(x.axis, found[0]):
            labels = [values[i] for i in self.arrays if i != x.axis and values[i].variable.ndim == 1] or [x]
            local = shards.make(lambda v: T.arange(v.shape[0 if labels != [x] else x.axis]), labels[:1], rows(axis),
                                like=self.index[x.axis])
            return values[:x.axis] + [local] + values[x.axis + 1:], rows(self.first + axis)

        def places(indices, variable, end):
            each = variable.shape[x.axis] // shards.own
            first = shards.check(node, PLACES, shards.first * each, T.eq(each * shards.total, end),
                                 T.eq(variable.shape[x.axis], each * shards.own))
            return indices - T.cast(first, indices.dtype)
        local = shards.make(places, [values[x.axis], x, end], values[x.axis].state, like=self.index[x.axis])
        return values[:x.axis] + [local] + values[x.axis + 1:], rows(self.first + axis)

    def _in_own_rows(self, x, values):
        """The index of ``x[arange(n) * c + labels]``, whose numbers are to be those of rows of the same sample.

        This is checked for each batch, whatever `c` is.
        """
        shards, node = self.shards, self.node
        if not _begins_with_places(shards, self.index[x.axis]):
            shards.refuse(node, PLACES)
        if not any(values[i].kind == ROWS for i in self.arrays):
            if any(self.index[i].ndim != 1 for i in self.arrays):
                shards.refuse(node, PLACES)
            values = values[:x.axis] + [self._own_part(values[x.axis], x.state.outer)] + values[x.axis + 1:]
        values, state = self.rows(values)

        def places(indices, variable, blocks=1):
            each = variable.shape[x.axis] // blocks // shards.own
            given = T.cast(indices, 'int64')
            block, place = given // (each * shards.total), given % (each * shards.total) - shards.first * each
            right = [T.ge(block, 0), T.lt(block, blocks), T.ge(place, 0), T.lt(place, shards.own * each)]
            found = shards.check(node, PLACES, block * shards.own * each + place, *map(T.all, right))
            return T.cast(found, indices.dtype)
        outer = [] if x.state.outer is None else [shards.length(x.state.outer)]
        local = shards.make(places, [values[x.axis], x] + outer, values[x.axis].state, like=self.index[x.axis])
        return values[:x.axis] + [local] + values[x.axis + 1:], state

    def _own_part(self, index, outer):
        """The replica's rows of a CONSTANT vector, which is to have as many for each sample of each block."""
        shards = self.shards
        blocks = [] if outer is None else [shards.length(outer)]
        checked = shards.make(lambda v, n=1: shards.check(
            self.node, PLACES, v, T.eq(v.shape[0] % (n * shards.total), 0)), [index] + blocks, index.state)
        return shards.cut(checked, 0, outer)

    def _is_plain(self, axis, end):
        """Whether this is ``x[arange(N), labels]``, all with one row a sample.

        It then stays what it is, for Theano knows how to compute its log and gradient where x is a softmax: a
        cross-entropy that does not overflow.
        """
        return isinstance(self.index[axis].owner.op, basic.ARange) and is_total(self.shards, end) \
            and has_row_each(self.shards, self.node.inputs[0], axis) \
            and all(i == axis or self.index[i].ndim == 1 and has_row_each(self.shards, self.index[i], 0)
                    for i in self.arrays)


def _cut(shards, value, axis, outer):
    if value.kind == CONSTANT and axis >= 0 and axis < value.variable.ndim \
            and not value.variable.type.broadcastable[axis]:
        return shards.cut(value, axis, outer, widens=True)
    return value


def _begins_with_places(shards, variable):
    """Whether an index is a sum with the places of all samples, each times a number, in it."""
    node = variable.owner
    if not node:
        return False
    if isinstance(node.op, basic.ARange):
        return number(node.inputs[0]) == 0 and shards.value(node.inputs[1]).state.size == COUNT
    if isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, (scalar.Add, scalar.Mul)):
        return any(_begins_with_places(shards, v) for v in node.inputs)
    return isinstance(node.op, ALIKE) and _begins_with_places(shards, node.inputs[0]) \
        or isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, (scalar.Cast, scalar.Sub)) \
        and _begins_with_places(shards, node.inputs[0])


def _places(variable):
    """The end n and the axis of an array whose elements are 0, 1, 2 … n - 1 along this axis; None of others."""
    node = variable.owner
    if not node:
        return None
    if isinstance(node.op, basic.ARange):
        return (node.inputs[1], 0) if number(node.inputs[0]) == 0 and number(node.inputs[2]) == 1 else None
    if isinstance(node.op, elemwise.Elemwise) and isinstance(node.op.scalar_op, scalar.Switch):
        condition = node.inputs[0]
        while condition.owner and isinstance(condition.owner.op, elemwise.DimShuffle):
            condition, = condition.owner.inputs
        chosen = None if condition.ndim else number(condition)
        return None if chosen is None else _places(node.inputs[1 if chosen else 2])
    if not isinstance(node.op, (elemwise.DimShuffle, basic.Reshape)):
        return None
    found, lengthy = _places(node.inputs[0]), [i for i, is_one in enumerate(variable.broadcastable) if not is_one]
    return (found[0], lengthy[0]) if found and len(lengthy) == node.inputs[0].broadcastable.count(False) == 1 else None


@rule(subtensor.AdvancedSubtensor1, subtensor.AdvancedSubtensor)
def _advanced_subtensor(shards, node, values):
    values = wholes(shards, values)
    x, index = values[0], values[1:]
    if all(value.kind == CONSTANT for value in values):
        return shards.constant(node, values)
    indexed = _Indexed(shards, node, node.inputs[1:])
    if x.kind == CONSTANT:
        index, state = indexed.rows(index)
        return shards.apply(node, [x] + index, state)
    if x.axis not in indexed.arrays and all(value.kind == CONSTANT for value in index):
        return shards.apply(node, values, x.state._replace(axis=indexed.axis(x.axis)))
    index, state = indexed.own_places(x, index)
    return shards.apply(node, [x] + index, state)


def _slice_of(variable):
    if isinstance(variable, theano.Constant):
        return variable.data
    if variable.owner and isinstance(variable.type, SliceType):
        return slice(*map(known, variable.owner.inputs))
    return None


@rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)
def _advanced_inc_subtensor(shards, node, values):
    x, y, index = values[0], values[1], wholes(shards, values[2:])
    constant = all(value.kind == CONSTANT for value in index)
    if constant and adds_to_zero(node, x, y):
        return shards.apply(node, [x, y] + index, y.state)
    x, y = wholes(shards, [x, y])
    if constant and x.kind == y.kind == CONSTANT:
        return shards.constant(node, [x, y] + index)
    indexed = _Indexed(shards, node, node.inputs[2:])
    own = x.axis if x.kind == ROWS else indexed.axis_of_places()
    if own in indexed.arrays:
        # One-hot codes, and the gradient of x[arange(n), labels]: each sample writes into its own row.
        x = indexed.as_many_as_places(x, own) if x.kind == CONSTANT else x
        index, state = indexed.own_places(x, index)
        return shards.apply(node, [x, indexed.beside(y, state)] + index, x.state)
    if constant:  # along other axes than that of the samples
        state = x.state if x.kind == ROWS else y.state._replace(
            axis=indexed.source(y.axis + indexed.ndim - node.inputs[1].ndim))
        x = shards.cut(x, state.axis, state.outer) if x.kind == CONSTANT else x
        return shards.apply(node, [x, indexed.beside(y, state._replace(axis=indexed.axis(state.axis)))] + index, state)
    if x.kind == ROWS:
        shards.refuse(node, PLACES)
    if node.op.set_instead_of_inc or not is_zero(node.inputs[0]):
        # Where samples may say the same place, their order counts, or what it had before.
        found, = shards.constant(node, [x] + [shards.gathered(value) if value.kind == ROWS else value
                                              for value in [y] + index])
        # Its lengths are those of x, and its numbers no lengths.
        return [found._replace(state=x.state) if node.outputs[0].dtype.startswith('float') else found]
    # Rows that are added into zeros, wherever the samples say: a share of a sum, such as an embedding's gradient.
    index, state = indexed.rows(index)
    return shards.apply(node, [x, indexed.beside(y, state)] + index, partial())
