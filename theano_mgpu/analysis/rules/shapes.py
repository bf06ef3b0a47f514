"""Shapes, what is made by a shape, and what changes it."""
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise, opt

from ..shards import rule
from ..sizes import elements, number
from ..states import CONSTANT, COUNT, PARTIAL, ROWS, WHOLE, State, rows
from .base import constants, wholes

MADE_OF_SAMPLES = 'its shape is made of samples'
UNKNOWN = 'it merges or splits the axis of the samples in a way that is not known'


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


@rule(compile_ops.SpecifyShape)
def _specified(shards, node, values):
    x, shape = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)[0]
    if x.kind != ROWS:
        return shards.apply(node, [x, shape], x.state)

    def local(variable, lengths):
        lengths = [lengths[i] for i in range(variable.ndim)]
        right = T.eq(whole_length(shards, variable, x.axis), lengths[x.axis])
        variable = shards.check(node, 'the batch has another length', variable, right)
        lengths[x.axis] = variable.shape[x.axis]
        return T.specify_shape(variable, T.stack(lengths))
    return [shards.make(local, [x, shape], x.state, like=node.outputs[0])]


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
        shards.refuse(node, MADE_OF_SAMPLES)
    axis, merges = _place_of_samples(shards, node, x, shape)
    layout = shards.make_all(lambda v, *outer: _layout(shards, v, x.axis, *outer),
                             [x] + [shards.length(v) for v in [x.state.outer] if v is not None], [WHOLE] * 2)

    def place(before, after, sizes):
        return _resolved(shards, node, before, after, [sizes[i] for i in range(node.op.ndim)], axis, merges)
    blocks, each = shards.make_all(place, layout + [shape], [WHOLE] * 2)

    def local(variable, sizes, blocks, each):
        # -1 elsewhere stays -1.
        sizes = [sizes[i] for i in range(node.op.ndim)]
        sizes[axis] = blocks * each * shards.own
        return variable.reshape(sizes, ndim=node.op.ndim)
    return [shards.make(local, [x, shape, blocks, each], rows(axis, blocks.variable if merges else None),
                        like=node.outputs[0])]


def _layout(shards, variable, axis, outer=1):
    """What lies outside of the samples of rows, and the elements of each inside."""
    lengths = [variable.shape[i] for i in range(variable.ndim)]
    return (_product(lengths[:axis] + [outer]),
            _product([lengths[axis] // outer // shards.own] + lengths[axis + 1:]))


def _resolved(shards, node, before, after, sizes, axis, merges):
    """The blocks of samples along an axis of new sizes, and the rows of each sample in a block, both checked."""
    rest = -_product(sizes)
    sizes = [T.switch(T.lt(size, 0), before * shards.total * after // rest, size) for size in sizes]
    outside, inside = _product(sizes[:axis]), _product(sizes[axis + 1:])
    blocks, each = before // outside, after // inside
    right = [T.eq(blocks * outside, before), T.eq(each * inside, after),
             T.eq(sizes[axis], blocks * each * shards.total)] + ([] if merges else [T.eq(blocks, 1)])
    return shards.check(node, UNKNOWN, blocks, *right), shards.check(node, UNKNOWN, each, *right)


def _place_of_samples(shards, node, x, shape):
    """The axis of the samples after a reshape, and whether something else is merged into it from outside."""
    found = elements(node.inputs[1], shape.state.size) or (shape.state.size,) * node.op.ndim
    sizes = [(size, number(node.inputs[1][i]) if size is None else None) for i, size in enumerate(found)]
    counts = [i for i, (size, _) in enumerate(sizes) if size == COUNT]
    axes = counts or [i for i, (_, n) in enumerate(sizes) if n == -1]
    kept = [sum(n != 1 for _, n in sizes[:i]) for i in range(len(sizes))]  # axes ahead of each
    before = sum(not _is_single(node.inputs[0], i) for i in range(x.axis)) + (x.state.outer is not None)
    if len(axes) > 1:
        axes = [i for i in axes if kept[i] == before]
    if len(axes) != 1 or any(size not in (None, COUNT) for size, _ in sizes):
        shards.refuse(node, 'it is unknown which axis has the samples')
    axis, = axes
    if kept[axis] and not before:
        shards.refuse(node, UNKNOWN)
    like = _has_shape_of(shards, node.inputs[1])
    if 0 < kept[axis] < before and like.kind == ROWS:  # such as the gradient of another reshape
        return axis, like.state.outer is not None
    return axis, kept[axis] < before


def _has_shape_of(shards, shape):
    """The Value that a vector is the shape of, else that of the vector."""
    return shards.value(shape.owner.inputs[0] if shape.owner and isinstance(shape.owner.op, compile_ops.Shape)
                        else shape)


def _is_single(variable, axis):
    """Whether the length of an axis is known to be 1."""
    if variable.type.broadcastable[axis]:
        return True
    node = variable.owner
    if node and isinstance(node.op, elemwise.DimShuffle):
        place = node.op.new_order[axis]
        return place == 'x' or _is_single(node.inputs[0], place)
    return bool(node) and isinstance(node.op, basic.Alloc) and number(node.inputs[1 + axis]) == 1


def _merged(shards, x, axes):
    """What lies outside of the samples of rows where axes ahead are merged into that of the samples."""
    if not axes:
        return x.state.outer
    outer = [shards.length(x.state.outer)] if x.state.outer is not None else []
    return shards.make(lambda v, *more: _product([v.shape[i] for i in axes] + list(more)), [x] + outer,
                       WHOLE).variable


def _product(lengths):
    return T.mul(1, *lengths) if lengths else T.constant(1, dtype='int64')


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
    return shards.apply(node, values, rows(node.op.outdim - 1, _merged(shards, x, ahead)))


@rule(basic.Alloc)
def _alloc(shards, node, values):
    value, sizes = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)
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
    return shards.constant(node, constants(shards, node, values, MADE_OF_SAMPLES))
