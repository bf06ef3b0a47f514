"""Shapes, what is made by a shape, and what changes it."""
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise, opt

from ..shards import rule
from ..sizes import elements, number
from ..states import CONSTANT, COUNT, PARTIAL, ROWS, WHOLE, State, rows
from .base import wholes


@rule(compile_ops.Shape)
def _shape(shards, node, values):
    value = values[0]
    if value.kind != ROWS:  # of a share of a sum: that of the sum
        return shards.apply(node, [shards.shaped_like(value)], WHOLE)
    size = tuple(COUNT if i == value.axis else None for i in range(node.inputs[0].ndim))

    def whole(x):
        return T.stack([whole_length(shards, x, i) if i == value.axis else x.shape[i] for i in range(x.ndim)])
    return [shards.make(whole, values, State(CONSTANT, size=size), like=node.outputs[0])]


@rule(compile_ops.Shape_i)
def _shape_i(shards, node, values):
    value = values[0]
    if value.kind != ROWS or value.axis != node.op.i:
        return shards.apply(node, [shards.shaped_like(value)], WHOLE)
    return [shards.make(lambda x: whole_length(shards, x, value.axis), values, State(CONSTANT, size=COUNT))]


def whole_length(shards, x, axis):
    """The length of the axis of the samples of rows for the whole batch."""
    return x.shape[axis] // shards.own * shards.total


@rule(opt.MakeVector)
def _make_vector(shards, node, values):
    return shards.constant(node, wholes(shards, values))


@rule(elemwise.DimShuffle)
def _dimshuffle(shards, node, values):
    state, order = values[0].state, list(node.op.new_order)
    if state.kind == ROWS:
        if state.axis not in order:
            shards.refuse(node, 'it drops the axis of the samples')
        state = state._replace(axis=order.index(state.axis))
    return shards.apply(node, values, state)


@rule(basic.Reshape)
def _reshape(shards, node, values):
    x, shape = values[0], shards.whole(values[1])
    if x.kind == PARTIAL:
        return shards.apply(node, [x, shape], x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x, shape])
    if shape.kind != CONSTANT:
        shards.refuse(node, 'its shape is made of samples')
    axis, outer = _place_of_samples(shards, node, x, shape)

    def local(variable, sizes):
        # -1 stays -1: the size of an axis that has samples is a multiple of their number.
        sizes = [sizes[i] for i in range(node.op.ndim)]
        sizes[axis] = T.switch(T.lt(sizes[axis], 0), sizes[axis], sizes[axis] // shards.total * shards.own)
        return variable.reshape(sizes, ndim=node.op.ndim)
    return [shards.make(local, [x, shape], rows(axis, outer), like=node.outputs[0])]


def _place_of_samples(shards, node, x, shape):
    """The axis of the samples after a reshape, and what lies outside of them on it."""
    given = node.inputs[0]
    found = elements(node.inputs[1], shape.state.size) or (shape.state.size,) * node.op.ndim
    sizes = [(size, _number_at(node.inputs[1], i) if size is None else None) for i, size in enumerate(found)]
    counts = [i for i, (size, _) in enumerate(sizes) if size == COUNT]
    axes = counts or [i for i, (_, n) in enumerate(sizes) if n == -1]
    if len(axes) != 1 or any(size not in (None, COUNT) for size, _ in sizes):
        shards.refuse(node, 'it cannot be told which axis has the samples')
    axis, = axes
    before = [i for i in range(x.axis) if not _is_single(given, i)]
    kept = [n for _, n in sizes[:axis] if n != 1]
    merged = x.state.outer
    if not before and not kept and merged is None:
        return axis, None
    split = merged is not None and node.op.ndim > given.ndim
    if kept and (split or len(kept) >= len(before) > 0 or x.axis > 0 and _is_single(given, x.axis - 1)):
        return axis, None
    # Axes ahead of that of the samples are merged into it; sizes after it must not grow.
    if axis == 0 and node.op.ndim <= given.ndim - x.axis:
        return 0, merged if merged is not None else T.mul(*[x.variable.shape[i] for i in range(x.axis)], 1)
    return shards.refuse(node, 'it merges or splits the axis of the samples in a way that is not known')


def _number_at(vector, i):
    return number(vector[i])


def _is_single(variable, axis):
    """Whether the length of an axis is known to be 1."""
    if variable.type.broadcastable[axis]:
        return True
    node = variable.owner
    if node and isinstance(node.op, elemwise.DimShuffle):
        place = node.op.new_order[axis]
        return place == 'x' or _is_single(node.inputs[0], place)
    return bool(node) and isinstance(node.op, basic.Alloc) and number(node.inputs[1 + axis]) == 1


@rule(basic.Flatten)
def _flatten(shards, node, values):
    x = values[0]
    if x.kind == PARTIAL:
        return shards.apply(node, values, x.state)
    if x.axis < node.op.outdim - 1:
        return shards.apply(node, values, x.state)
    if node.op.outdim > 1 and x.axis > node.op.outdim - 1:
        shards.refuse(node, 'it merges axes into that of the samples')
    ahead = range(node.op.outdim - 1, x.axis)
    outer = x.state.outer if not ahead else T.mul(*[x.variable.shape[i] for i in ahead], 1)
    return shards.apply(node, values, rows(node.op.outdim - 1, outer))


@rule(basic.Alloc)
def _alloc(shards, node, values):
    value, sizes = values[0], wholes(shards, values[1:])
    if any(size.kind != CONSTANT for size in sizes):
        shards.refuse(node, 'its shape is made of samples')
    if value.kind == PARTIAL:
        value = shards.whole(value)
    if value.kind == CONSTANT:
        return shards.constant(node, [value] + sizes)
    axis = value.axis + node.outputs[0].ndim - node.inputs[0].ndim

    def local(variable, *lengths):
        lengths = list(lengths)
        lengths[axis] = variable.shape[value.axis]
        return T.alloc(variable, *lengths)
    return [shards.make(local, [value] + sizes, value.state._replace(axis=axis), like=node.outputs[0])]


@rule(basic.AllocEmpty)
def _alloc_empty(shards, node, values):
    values = wholes(shards, values)
    if any(value.kind != CONSTANT for value in values):
        shards.refuse(node, 'its shape is made of samples')
    return shards.constant(node, values)
