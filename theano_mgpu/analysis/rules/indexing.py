"""Indexing, joining and splitting."""
import theano
import theano.tensor as T
from theano.tensor import basic, extra_ops, opt, subtensor
from theano.tensor.type_other import NoneTypeT, SliceType

from ..shards import rule
from ..sizes import number
from ..states import CONSTANT, PARTIAL, ROWS, partial, rows
from .base import aligned, is_zero, only_rows_on, same_rows, wholes

PLACES = 'it picks samples by their place in the batch'


def _entries(node, skip):
    """Entries of a basic index, numbers where they are known."""
    found = []
    for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list):
        if isinstance(entry, slice):
            entry = slice(*[part if part is None or number(part) is None else number(part)
                            for part in (entry.start, entry.stop, entry.step)])
        found.append(entry)
    return found


def _is_whole(entry):
    return isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None and entry.step in (None, 1)


@rule(subtensor.Subtensor)
def _subtensor(shards, node, values):
    x, numbers = values[0], wholes(shards, values[1:])
    if any(value.kind != CONSTANT for value in numbers):
        shards.refuse(node, 'its index is made of samples')
    if x.kind == PARTIAL:
        return shards.apply(node, [x] + numbers, x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x] + numbers)
    entries = _entries(node, 1)
    if x.axis < len(entries) and not _is_whole(entries[x.axis]):
        shards.refuse(node, PLACES)
    axis = x.axis - sum(not isinstance(entry, slice) for entry in entries[:x.axis])
    return shards.apply(node, [x] + numbers, x.state._replace(axis=axis))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(shards, node, values):
    x, y, numbers = values[0], values[1], wholes(shards, values[2:])
    if any(value.kind != CONSTANT for value in numbers):
        shards.refuse(node, 'its index is made of samples')
    if _adds_to_zero(node, x, y):
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
    if axis not in kept or axis < len(entries) and not _is_whole(entries[axis]):
        shards.refuse(node, PLACES)
    own = kept.index(axis) - shift  # of y
    if y.kind == ROWS and (y.axis != own or (y.state.outer is None) != (outer is None)):
        shards.refuse(node, 'samples lie along different axes of its inputs')
    if x.kind == CONSTANT:
        x = shards.cut(x, axis, outer)
    if y.kind == CONSTANT and own >= 0 and not node.inputs[1].type.broadcastable[own]:
        y = shards.cut(y, own, outer)
    return shards.apply(node, [x, y] + numbers, rows(axis, outer))


def _adds_to_zero(node, x, y):
    """Whether a share of a sum is written into zeros, so that the whole is a share, too."""
    return y.kind == PARTIAL and y.state.how == 'sum' and x.kind == CONSTANT and is_zero(node.inputs[0]) \
        and x.stage <= y.stage


@rule(subtensor.AdvancedSubtensor1)
def _take(shards, node, values):
    x, index = wholes(shards, values)
    if x.kind == CONSTANT and index.kind == CONSTANT:
        return shards.constant(node, [x, index])
    if x.kind == CONSTANT:
        return shards.apply(node, [x, index], index.state)
    if x.axis > 0 and index.kind == CONSTANT:
        return shards.apply(node, [x, index], x.state)
    return shards.refuse(node, PLACES)


@rule(subtensor.AdvancedSubtensor)
def _advanced_subtensor(shards, node, values):
    values = wholes(shards, values)
    x, index = values[0], values[1:]
    if x.kind == CONSTANT and all(value.kind == CONSTANT for value in index):
        return shards.constant(node, values)
    arrays = [i for i, v in enumerate(node.inputs[1:]) if not isinstance(v.type, (SliceType, NoneTypeT))]
    ndim = max(node.inputs[1 + i].ndim for i in arrays)
    if x.kind == ROWS and not any(index[i].kind == ROWS for i in arrays) and x.axis < arrays[0] \
            and _is_whole(_slice_of(node.inputs[1 + x.axis])):
        return shards.apply(node, values, x.state)
    if arrays != list(range(len(arrays))):
        shards.refuse(node, PLACES)
    if x.kind == ROWS:
        return shards.apply(node, [x] + _own_places(shards, node, x, index, arrays), rows())
    # As the arrays are broadcast against each other.
    state = same_rows(shards, node, [_broadcast(value, ndim) for value in index if value.kind == ROWS])
    index = [_cut_index(shards, value, state.axis - (ndim - value.variable.ndim), state.outer)
             if i in arrays else value for i, value in enumerate(index)]
    return shards.apply(node, [x] + index, state)


def _broadcast(value, ndim):
    return value._replace(state=value.state._replace(axis=value.axis + ndim - value.variable.ndim))


def _cut_index(shards, value, axis, outer):
    if value.kind == CONSTANT and axis >= 0 and not value.variable.type.broadcastable[axis]:
        return shards.cut(value, axis, outer)
    return value


def _own_places(shards, node, x, index, arrays):
    """The index of ``x[arange(n), labels]``, in which each sample picks of its own row: of those of the replica."""
    if x.axis != 0 or x.state.outer is not None or not _are_places(node.inputs[1], index[0]) \
            or any(node.inputs[1 + i].ndim != 1 for i in arrays):
        shards.refuse(node, PLACES)
    only_rows_on(shards, node, index, 0)
    places = _places_of_rows(shards, node.inputs[1], x)
    return [places] + [_cut_index(shards, value, 0, None) if i in arrays else value
                       for i, value in enumerate(index)][1:]


def _places_of_rows(shards, places, x):
    """The places that are those of all rows, for the rows of a replica; that they are all is checked as it runs."""
    def own(variable, stop):
        every = T.eq(stop * shards.own, variable.shape[0] * shards.total)
        return opt.Assert('%s: %s' % (places, PLACES))(T.arange(variable.shape[0]), every)
    return shards.make(own, [x, shards.value(places.owner.inputs[1])], rows(), like=places)


def _are_places(variable, value):
    """Whether a vector is 0, 1, 2 … for all samples."""
    node = variable.owner
    return value.kind == CONSTANT and bool(node) and isinstance(node.op, basic.ARange) \
        and number(node.inputs[0]) == 0 and number(node.inputs[2]) == 1 and value.state.size is not None


def _slice_of(variable):
    if isinstance(variable, theano.Constant):
        return variable.data
    if variable.owner and isinstance(variable.type, SliceType):
        return slice(*[None if isinstance(v.type, NoneTypeT) else number(v) for v in variable.owner.inputs])
    return None


@rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)
def _advanced_inc_subtensor(shards, node, values):
    x, y, index = values[0], values[1], wholes(shards, values[2:])
    arrays = [i for i, v in enumerate(node.inputs[2:]) if not isinstance(v.type, (SliceType, NoneTypeT))]
    if any(value.kind == ROWS for value in index) and x.kind == CONSTANT and not node.op.set_instead_of_inc \
            and is_zero(node.inputs[0]) and not _are_places(node.inputs[2], values[2]):
        return _scattered(shards, node, x, shards.whole(y) if y.kind == PARTIAL else y, index, arrays)
    if all(value.kind == CONSTANT for value in index) and _adds_to_zero(node, x, y):
        return shards.apply(node, [x, y] + index, y.state)
    x, y = wholes(shards, [x, y])
    if all(value.kind == CONSTANT for value in [x, y] + index):
        return shards.constant(node, [x, y] + index)
    if not _are_places(node.inputs[2], values[2]) or arrays != list(range(len(arrays))):
        return _beside_samples(shards, node, x, y, index, arrays)
    # One-hot codes, and the gradient of x[arange(n), labels]: each sample writes into its own row.
    if x.kind == CONSTANT:
        x = shards.cut(x, 0)
    own = node.inputs[1].ndim - (node.inputs[0].ndim - len(arrays) + 1)  # of y; below 0 where it is broadcast
    if y.kind == ROWS and (y.axis != own or y.state.outer is not None):
        shards.refuse(node, 'samples lie along different axes of its inputs')
    y = _cut_index(shards, y, own, None)
    return shards.apply(node, [x, y] + _own_places_of(shards, node, x, index, arrays), rows())


def _own_places_of(shards, node, x, index, arrays):
    if x.axis != 0 or x.state.outer is not None or any(node.inputs[2 + i].ndim != 1 for i in arrays):
        shards.refuse(node, PLACES)
    only_rows_on(shards, node, index, 0)
    places = _places_of_rows(shards, node.inputs[2], x)
    return [places] + [_cut_index(shards, value, 0, None) if i in arrays else value
                       for i, value in enumerate(index)][1:]


def _scattered(shards, node, x, y, index, arrays):
    """Rows that are added into zeros, wherever the samples say: a share of a sum, such as an embedding's gradient."""
    ndim = max(node.inputs[2 + i].ndim for i in arrays)
    state = same_rows(shards, node, [_broadcast(value, ndim) for value in index if value.kind == ROWS])
    index = [_cut_index(shards, value, state.axis - (ndim - value.variable.ndim), state.outer)
             if i in arrays else value for i, value in enumerate(index)]
    if arrays != list(range(len(arrays))):
        shards.refuse(node, PLACES)
    own = state.axis - (node.inputs[0].ndim - len(index) + ndim - node.inputs[1].ndim) \
        if type(node.op) is subtensor.AdvancedIncSubtensor1 else \
        state.axis - (node.inputs[0].ndim - len(arrays) + ndim - node.inputs[1].ndim)
    if y.kind == ROWS and y.axis != own:
        shards.refuse(node, 'samples lie along different axes of its inputs')
    y = _cut_index(shards, y, own, state.outer)
    return shards.apply(node, [x, y] + index, partial())


def _beside_samples(shards, node, x, y, index, arrays):
    """An index along other axes than that of the samples."""
    state = x.state if x.kind == ROWS else y.state
    if any(value.kind == ROWS for value in index) or y.kind == x.kind == CONSTANT:
        shards.refuse(node, PLACES)
    if x.kind == ROWS and type(node.op) is subtensor.AdvancedIncSubtensor and x.axis < arrays[0] \
            and _is_whole(_slice_of(node.inputs[2 + x.axis])) and (y.kind == CONSTANT or y.state == x.state):
        if y.kind == CONSTANT and node.inputs[1].ndim == node.outputs[0].ndim:
            y = _cut_index(shards, y, x.axis, x.state.outer)
        return shards.apply(node, [x, y] + index, state)
    if type(node.op) is subtensor.AdvancedIncSubtensor and y.kind == ROWS and y.axis < arrays[0] \
            and _is_whole(_slice_of(node.inputs[2 + y.axis])) and x.kind == CONSTANT:
        return shards.apply(node, [shards.cut(x, y.axis, y.state.outer), y] + index, state)
    return shards.refuse(node, PLACES)


@rule(basic.Join)
def _join(shards, node, values):
    axis, values = number(node.inputs[0]), [values[0]] + wholes(shards, values[1:])
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    parts, state = aligned(shards, node, values[1:])
    if axis is None or int(axis) % node.outputs[0].ndim == state.axis:
        shards.refuse(node, 'it joins along the samples')
    return shards.apply(node, values[:1] + parts, state)


@rule(basic.Split)
def _split(shards, node, values):
    x, axis = wholes(shards, values[:1])[0], number(node.inputs[1])
    if x.kind != ROWS:
        return shards.constant(node, [x] + wholes(shards, values[1:]))
    if axis is None or int(axis) % node.inputs[0].ndim == x.axis:
        shards.refuse(node, 'it splits the samples')
    return shards.apply(node, [x] + values[1:], x.state)


@rule(extra_ops.RepeatOp)
def _repeat(shards, node, values):
    x, times = wholes(shards, values)
    if x.kind == times.kind == CONSTANT:
        return shards.constant(node, [x, times])
    if x.kind != ROWS or times.kind != CONSTANT or node.op.axis is None or node.inputs[1].ndim \
            or node.op.axis == x.axis and x.state.outer is not None:
        shards.refuse(node, PLACES)
    return shards.apply(node, [x, times], x.state)
