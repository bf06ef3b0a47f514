"""Shapes, arrays that are made by a shape, and ops that change it."""
import theano.tensor as T
from theano import sparse
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise

from ..known import number
from ..rows import rows_of_each, rows_of_size
from ..shards import rule
from ..sizes import elements
from ..states import CONSTANT, COUNT, PARTIAL, ROWS, WHOLE, State, rows
from .base import constants, refuse_rows

MADE_OF_SAMPLES = 'its shape is made of samples'
OTHER_LENGTH = 'its length is not the number of samples'
UNKNOWN_AXIS = 'it is unknown which axis has the samples'
UNKNOWN = 'it merges or splits the axis of the samples in a way that is not known'


@rule(compile_ops.Shape)
def _shape(shards, node, values):
    value = values[0]
    if value.kind != ROWS:  # a share of a sum has the shape of the sum
        return shards.apply(node, [shards.shaped_like(value)], WHOLE)
    size = tuple(COUNT if i == value.axis else None for i in range(node.inputs[0].ndim))

    def whole(x):
        return T.stack([shards.whole_length(x, i) if i == value.axis else x.shape[i] for i in range(x.ndim)])
    return [shards.make(whole, values, State(CONSTANT, size=size), like=node.outputs[0])]


@rule(compile_ops.Shape_i)
def _shape_i(shards, node, values):
    return [shards.converted(node.inputs[0].shape[node.op.i])]


@rule(compile_ops.SpecifyShape)
def _specified(shards, node, values):
    x, shape = node.inputs
    refuse_rows(shards, node, values[1:], MADE_OF_SAMPLES)
    right = [T.eq(x.shape[i], shape[i]) for i in range(x.ndim)]
    return [shards.converted(shards.check(node, 'the batch has another length', x, *right))]


@rule(elemwise.DimShuffle, sparse.Transpose)
def _dimshuffle(shards, node, values):
    state, order = values[0].state, list(getattr(node.op, 'new_order', (1, 0)))
    if state.kind == ROWS:
        if state.axis not in order:
            shards.refuse(node, 'it drops the axis of the samples')
        state = state._replace(axis=order.index(state.axis))
    return shards.apply(node, values, state)


@rule(basic.Reshape)
def _reshape(shards, node, values):
    x, (shape,) = values[0], constants(shards, node, values[1:], MADE_OF_SAMPLES)
    if x.kind == PARTIAL:
        return shards.apply(node, [x, shape], x.state)
    if x.kind == CONSTANT:
        return shards.constant(node, [x, shape])
    axis, merges = _place_of_samples(shards, node, x, shape)
    layout = shards.make_all(lambda v, *outer: _layout(shards, v, x.axis, *outer), [x] + shards.outer(x), [WHOLE] * 2)

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
    """Return the number of elements outside of the samples of rows, and inside of each sample."""
    lengths = [variable.shape[i] for i in range(variable.ndim)]
    return (_product(lengths[:axis] + [outer]),
            _product([lengths[axis] // outer // shards.own] + lengths[axis + 1:]))


def _resolved(shards, node, before, after, sizes, axis, merges):
    """Return the blocks of samples along an axis of new sizes, and the rows of each sample in a block, both checked."""
    rest = T.maximum(-_product(sizes), 1)
    sizes = [T.switch(T.lt(size, 0), before * shards.total * after // rest, size) for size in sizes]
    outside, inside = _product(sizes[:axis]), _product(sizes[axis + 1:])
    is_empty = T.eq(before * after, 0)  # then only the new sizes tell the rows of a sample
    blocks = T.switch(is_empty, 1, before // T.maximum(outside, 1))
    each = T.switch(is_empty, sizes[axis] // shards.total, after // T.maximum(inside, 1))
    right = [T.or_(is_empty, T.and_(T.eq(blocks * outside, before), T.eq(each * inside, after))),
             T.eq(sizes[axis], blocks * each * shards.total)] + ([] if merges else [T.eq(blocks, 1)])
    return shards.check(node, UNKNOWN, blocks, *right), shards.check(node, UNKNOWN, each, *right)


def _place_of_samples(shards, node, x, shape):
    """Return the axis of the samples after a reshape, and whether something else is merged into it from outside."""
    sizes = elements(node.inputs[1], shape.state.size) or (shape.state.size,) * node.op.ndim
    if any(size not in (None, COUNT) for size in sizes):
        shards.refuse(node, UNKNOWN_AXIS)
    numbers = [number(node.inputs[1][i]) if size is None else None for i, size in enumerate(sizes)]
    axes = [i for i, size in enumerate(sizes) if size == COUNT] or [i for i, n in enumerate(numbers) if n == -1]
    ahead = [sum(n != 1 for n in numbers[:i]) for i in range(len(numbers))]  # for each axis, the axes ahead of it
    before = sum(not _is_single(node.inputs[0], i) for i in range(x.axis)) + (x.state.outer is not None)
    if len(axes) > 1:
        axes = [i for i in axes if ahead[i] == before]
    if len(axes) != 1:
        shards.refuse(node, UNKNOWN_AXIS)
    axis, = axes
    if ahead[axis] and not before:
        shards.refuse(node, UNKNOWN)
    maker = node.inputs[1].owner
    if 0 < ahead[axis] < before and maker and isinstance(maker.op, compile_ops.Shape):
        like = shards.value(maker.inputs[0])  # the gradient of a reshape has the shape of its argument
        if like.kind == ROWS:
            return axis, like.state.outer is not None
    return axis, ahead[axis] < before


def _is_single(variable, axis):
    """Return whether the length of an axis is known to be 1."""
    if variable.type.broadcastable[axis]:
        return True
    node = variable.owner
    if node and isinstance(node.op, elemwise.DimShuffle):
        place = node.op.new_order[axis]
        return place == 'x' or _is_single(node.inputs[0], place)
    return bool(node) and isinstance(node.op, basic.Alloc) and number(node.inputs[1 + axis]) == 1


def _product(lengths):
    return T.mul(1, *lengths) if lengths else T.constant(1, dtype='int64')


@rule(basic.Flatten)
def _flatten(shards, node, values):
    return [shards.converted(T.flatten(node.inputs[0], node.op.outdim))]


@rule(basic.Alloc, of=ROWS)
def _alloc(shards, node, values):
    value = values[0]
    refuse_rows(shards, node, values[1:], MADE_OF_SAMPLES)
    axis = value.axis + node.outputs[0].ndim - node.inputs[0].ndim
    each = rows_of_each(shards, node.inputs[0], value.axis)
    is_certain = each is not None and rows_of_size(shards, node.inputs[1 + axis]) == each

    def local(variable, *lengths):
        lengths, own = list(lengths), variable.shape[value.axis]
        right = T.eq(lengths[axis], shards.whole_length(variable, value.axis))
        lengths[axis] = own if is_certain else shards.check(node, OTHER_LENGTH, own, right)
        return T.alloc(variable, *lengths)
    return [shards.make(local, values, value.state._replace(axis=axis), like=node.outputs[0])]
