"""Shapes, what is made by a shape, and what changes it."""
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise, opt, subtensor

from ..dependence import CONSTANT, COUNT, DRAWN, NUMBER, PLACES, ROWS, SIZES, UNIFORM, rows, sizes
from .base import DRAWS, constant, elements_of, rule


@rule(compile_ops.Shape)
def _shape(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS:
        return UNIFORM[COUNT if x.kind == PLACES else CONSTANT]
    return sizes([UNIFORM[COUNT if i == x.axis else CONSTANT] for i in range(node.inputs[0].ndim)])


@rule(compile_ops.Shape_i)
def _shape_i(analysis, node, inputs):
    x = inputs[0]
    return UNIFORM[COUNT if x.kind == PLACES or x.kind == ROWS and node.op.i == x.axis else CONSTANT]


@rule(opt.MakeVector)
def _make_vector(analysis, node, inputs):
    if any(d.kind == ROWS for d in inputs):
        return analysis.couple(node)
    return sizes(inputs)


@rule(basic.Reshape)
def _reshape(analysis, node, inputs):
    x, shape = inputs
    if x.kind != ROWS:
        return x if shape.kind == CONSTANT else analysis.couple(node)
    elements = elements_of(node.inputs[1], shape, node.op.ndim)
    # The size that stands for samples: a multiple of their number, else -1 for what is left.
    # That the other sizes keep each sample's elements together cannot be seen here.
    counts = [i for i, (d, _) in enumerate(elements) if d.kind == COUNT]
    axes = counts or [i for i, (_, n) in enumerate(elements) if n == -1]
    if len(axes) != 1 or any(d.kind not in (CONSTANT, COUNT) for d, _ in elements):
        return analysis.couple(node)
    axis, = axes
    before = [i for i in range(x.axis) if not _is_single(node.inputs[0], i)]
    kept = [n for _, n in elements[:axis] if n != 1]
    if not before and not kept and not x.merged:
        return rows(axis, x.filled)
    split = x.merged and node.op.ndim > node.inputs[0].ndim
    if kept and (split or len(kept) >= len(before) > 0 or x.axis > 0 and _is_single(node.inputs[0], x.axis - 1)):
        return rows(axis, x.filled)
    # Axes before that of the samples are merged into it; sizes after it must not grow.
    if axis == 0 and node.op.ndim <= node.inputs[0].ndim - x.axis:
        return rows(0, x.filled, x.merged or x.axis)
    return analysis.couple(node)


def _is_single(variable, axis):
    """Whether the length of an axis is known to be 1."""
    if variable.type.broadcastable[axis]:
        return True
    node = variable.owner
    if node and isinstance(node.op, elemwise.DimShuffle):
        return _is_single(node.inputs[0], node.op.new_order[axis])
    return bool(node) and isinstance(node.op, basic.Alloc) and constant(node.inputs[1 + axis]) == 1


@rule(basic.Flatten)
def _flatten(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or x.axis < node.op.outdim - 1:
        return x
    if node.op.outdim > 1 and x.axis > node.op.outdim - 1:
        return analysis.couple(node)
    return rows(node.op.outdim - 1, x.filled, x.merged or x.axis)


@rule(elemwise.DimShuffle)
def _dimshuffle(analysis, node, inputs):
    x, order = inputs[0], list(node.op.new_order)
    if x.kind == SIZES:
        return x if order == [0] else analysis.couple(node)
    if x.kind != ROWS:
        return x
    return x._replace(axis=order.index(x.axis)) if x.axis in order else analysis.couple(node)


@rule(basic.Alloc, basic.AllocEmpty)
def _alloc(analysis, node, inputs):
    value, shape = (inputs[0], inputs[1:]) if isinstance(node.op, basic.Alloc) else (UNIFORM[CONSTANT], inputs)
    axes = [i for i, d in enumerate(shape) if d.kind != CONSTANT]
    if value.kind == ROWS:
        axis = value.axis + node.outputs[0].ndim - node.inputs[0].ndim
        return value._replace(axis=axis) if axes == [axis] else analysis.couple(node)
    if not axes:
        return value
    if len(axes) > 1 or shape[axes[0]].kind != COUNT or value.kind != CONSTANT:
        return analysis.couple(node)
    broadcastable = node.inputs[0].type.broadcastable if isinstance(node.op, basic.Alloc) else ()
    own_axis = axes[0] - len(shape) + len(broadcastable)
    return rows(axes[0], CONSTANT if own_axis < 0 or broadcastable[own_axis] else None)


@rule(basic.ARange)
def _arange(analysis, node, inputs):
    from_0_by_1 = constant(node.inputs[0]) == 0 and constant(node.inputs[2]) == 1
    return UNIFORM[PLACES] if inputs[1].kind == COUNT and from_0_by_1 else analysis.couple(node)


@rule(*DRAWS)
def _draw(analysis, node, inputs):
    elements = inputs[1].elements if inputs[1].kind == SIZES else [inputs[1]] * node.outputs[1].ndim
    axes = [i for i, d in enumerate(elements) if d.kind == COUNT] + [d.axis for d in inputs[2:] if d.kind == ROWS]
    if any(d.kind not in (CONSTANT, ROWS) for d in inputs[2:]) \
            or any(d.kind not in (CONSTANT, COUNT, NUMBER) for d in elements):
        return [UNIFORM[CONSTANT], analysis.couple(node)]
    if len(axes) == 1 and all(d.kind != NUMBER for d in elements):
        return [UNIFORM[CONSTANT], rows(axes[0])]
    return [UNIFORM[CONSTANT], UNIFORM[DRAWN] if all(d.kind == CONSTANT for d in inputs[2:]) else analysis.couple(node)]


def of_drawn(analysis, node, inputs):
    """What is made of random numbers, which belong to no sample before they are put into rows."""
    others = [d for d in inputs if d.kind != DRAWN]
    if isinstance(node.op, (elemwise.Elemwise, basic.Join)) and all(d.kind == CONSTANT for d in others) \
            or isinstance(node.op, subtensor.Subtensor) and all(d.kind in (CONSTANT, COUNT, NUMBER) for d in others):
        return UNIFORM[DRAWN]
    if isinstance(node.op, basic.Reshape):
        elements = elements_of(node.inputs[1], inputs[1], node.op.ndim)
        counts = [i for i, (d, _) in enumerate(elements) if d.kind == COUNT]
        if len(counts) == 1 and all(d.kind in (CONSTANT, COUNT) for d, _ in elements):
            return rows(counts[0])
    return analysis.couple(node)
