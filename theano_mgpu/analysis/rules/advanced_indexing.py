"""Indexing by arrays."""
import theano.tensor as T
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, extra_ops, subtensor
from theano.tensor.type_other import NoneTypeT, SliceType

from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, COUNT, ROWS, has_rows, partial, rows
from .base import beside, is_scalar_op, is_whole, is_zero, own_rows, same_order, same_rows, slice_of
from .indexing import PLACES, adds_to_zero
from .rows import has_row_each, is_total

ALIKE = elemwise.DimShuffle, basic.Reshape, basic.Flatten, extra_ops.RepeatOp  # the numbers are those of the input


class _Indexed:
    """The layout of x[index]: which axes are indexed by arrays, and where the others come to lie.

    As in NumPy, the dimensions of the arrays, broadcast together, replace the indexed axes. They come first where a
    slice lies between the arrays.
    """

    def __init__(self, shards, node, index):
        if any(isinstance(v.type, NoneTypeT) for v in index):
            shards.refuse(node, PLACES)
        x = node.inputs[0]
        self.shards, self.node, self.index = shards, node, index
        self.arrays = [i for i, v in enumerate(index) if not isinstance(v.type, SliceType)]
        self.array_ndim = max(index[i].ndim for i in self.arrays)
        self.first = self.arrays[0] if self.arrays[-1] - self.arrays[0] + 1 == len(self.arrays) else 0
        self.others = [i for i in range(x.ndim) if i not in self.arrays]
        self.ndim = len(self.others) + self.array_ndim

    def _refuse(self):
        self.shards.refuse(self.node, PLACES)

    def _shift(self, i):
        """Return how many dimensions the arrays together have ahead of the dimensions of one of them."""
        return self.array_ndim - self.index[i].ndim

    def _is_whole(self, axis):
        return axis not in self.arrays and (axis >= len(self.index) or is_whole(slice_of(self.index[axis])))

    def axis(self, axis):
        """Return where an axis of x comes to lie, which must be whole."""
        if not self._is_whole(axis):
            self._refuse()
        place = self.others.index(axis)
        return place if place < self.first else place + self.array_ndim

    def source(self, axis):
        """Return the axis of x that comes to lie at this one."""
        for each in self.others:
            if self._is_whole(each) and self.axis(each) == axis:
                return each
        return self._refuse()

    def rows(self, values):
        """Return the arrays with the replica's rows, and the state of x[index]."""
        moved = [values[i]._replace(state=values[i].state._replace(axis=values[i].axis + self._shift(i)))
                 for i in self.arrays if values[i].kind == ROWS]
        state = same_rows(self.shards, self.node, moved)
        values = same_order(self.shards, self.node, values)
        values = [own_rows(self.shards, value, state.axis - self._shift(i), state.outer) if i in self.arrays else value
                  for i, value in enumerate(values)]
        return values, state._replace(axis=self.first + state.axis)

    def beside(self, y, state):
        """Return the replica's rows of a value that is written into x[index], which has this state."""
        return beside(self.shards, self.node, y, state.axis - (self.ndim - y.variable.ndim), state.outer)

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
            self._refuse()
        places, outer = _places(self.index[x.axis]), shards.outer(x)
        if places is None or outer:
            values, state = self.rows(self._with_own_rows(x, values, outer))
        else:
            axis = places[1] + self._shift(x.axis)
            if shards.value(places[0]).state.size != COUNT or any(
                    values[i].kind == ROWS and values[i].state != rows(axis - self._shift(i)) for i in self.arrays):
                self._refuse()
            values = [own_rows(shards, value, axis - self._shift(i)) if i in self.arrays else value
                      for i, value in enumerate(values)]
            state = rows(self.first + axis)
            if self._is_plain(x.axis, places[0]):
                labels = [values[i] for i in self.arrays if i != x.axis and values[i].variable.ndim == 1]
                values[x.axis] = shards.make(lambda v: T.arange(v.shape[0 if labels else x.axis]), labels[:1] or [x],
                                             rows(axis), like=self.index[x.axis])
                return values, state

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
            self._refuse()
        if any(values[i].kind == ROWS for i in self.arrays):
            return values
        if any(self.index[i].ndim != 1 for i in self.arrays):
            self._refuse()
        # As many rows for each sample of each block.
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


@rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)
def _advanced_inc_subtensor(shards, node, values):
    x, y, index = values[0], values[1], shards.wholes(values[2:])
    constant = not has_rows(index)
    if constant and adds_to_zero(node, x, y):
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
        output, = shards.constant(node, [x] + list(map(shards.gathered, [y] + index)))
        # Its lengths are those of x, and its numbers no lengths.
        return [output._replace(state=x.state) if node.outputs[0].dtype.startswith('float') else output]
    # Rows that are added into zeros, wherever the samples say: a share of a sum, such as an embedding's gradient.
    index, state = indexed.rows(index)
    return shards.apply(node, [x, indexed.beside(y, state)] + index, partial())
