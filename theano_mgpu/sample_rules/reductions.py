"""Reductions, products and convolutions."""
from theano import sparse
from theano.scalar import basic as scalar
from theano.tensor import basic, blas, elemwise, extra_ops
from theano.tensor.nnet import abstract_conv, bn, neighbours, nnet
from theano.tensor.signal import pool
from theano.tensor.sort import ArgSortOp, SortOp, TopKOp

from ..dependence import ACROSS, CONSTANT, COUNT, COUPLED, MEAN, ROWS, SHIFTED, SIZES, SUM, UNIFORM, rows
from .base import aligned, combined, constant, elements_of, product, rule


@rule(elemwise.CAReduce)
def _reduce(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis] if ndim else []
    adds = isinstance(node.op.scalar_op, scalar.Add)
    if x.kind == SIZES:
        kinds = [d.kind for d in x.elements]
        return UNIFORM[(combined(kinds) if adds else product(kinds)) or COUPLED]
    if x.kind == COUNT and len(axes):  # a vector of sizes that are all multiples
        length = len(elements_of(node.inputs[0], x) or ())
        return x if adds or length == 1 else analysis.couple(node)
    if x.kind != ROWS:
        return x if adds or not len(axes) or x.kind in (CONSTANT, COUPLED) else analysis.couple(node)
    if x.axis not in axes:
        if x.filled in ACROSS and not adds:
            analysis.couple(node)
            x = x._replace(filled=COUPLED)
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes))
    if not adds:
        analysis.couple(node, 'takes the %s over samples' % type(node.op.scalar_op).__name__.lower())
        return UNIFORM[COUPLED]
    if x.filled in (None, COUPLED, SHIFTED):
        return UNIFORM[COUPLED if x.filled == COUPLED else SUM]
    found = product([x.filled, COUNT])
    return UNIFORM[found] if found else analysis.couple(node)._replace(kind=COUPLED, axis=None)


@rule(basic.MaxAndArgmax, basic.Argmax)
def _argmax(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis]
    if x.kind == ROWS and x.axis not in axes:
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes), filled=None)
    analysis.couple(node, 'takes the maximum over samples')
    return UNIFORM[COUPLED]


@rule(extra_ops.CumOp, extra_ops.DiffOp, SortOp, ArgSortOp, TopKOp)
def _along_axis(analysis, node, inputs):
    x = inputs[0]
    axis = getattr(node.op, 'axis', None)
    if axis is None and len(node.inputs) > 1:
        axis = constant(node.inputs[1])
    if x.kind == ROWS and axis is not None and int(axis) % node.inputs[0].ndim != x.axis:
        return x._replace(filled=None)
    return analysis.couple(node)


@rule(nnet.Softmax, nnet.LogSoftmax, nnet.SoftmaxWithBias)
def _along_last_axis(analysis, node, inputs):
    x = inputs[0]
    return x if x.kind == ROWS and x.axis < node.inputs[0].ndim - 1 else analysis.couple(node)


@rule(nnet.CrossentropyCategorical1Hot, nnet.CrossentropySoftmaxArgmax1HotWithBias)
def _crossentropy(analysis, node, inputs):
    return rows() if all(d.kind == CONSTANT or d == rows(filled=d.filled) for d in inputs) else analysis.couple(node)


@rule(bn.AbstractBatchNormTrain)
def _batch_normalisation(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or any(CONSTANT not in (d.kind, d.filled) for d in inputs[1:]):
        return analysis.couple(node)
    if x.axis not in node.op.axes:
        return x
    analysis.couple(node, 'normalises each sub-batch by its own statistics')
    # Mean and inverse deviation, then the running averages of mean and variance.
    # Of inverse deviations `statistics.BatchUpdates` makes that of the whole batch.
    return [x] + [UNIFORM[MEAN], UNIFORM[COUPLED]] * (len(node.outputs) // 2)


@rule(basic.Dot, sparse.Dot, sparse.StructuredDot)
def _dot(analysis, node, inputs):
    (a, b), a_ndim = inputs, node.inputs[0].ndim
    over_a = a.kind == ROWS and a.axis == a_ndim - 1
    over_b = b.kind == ROWS and b.axis == 0
    if over_a and over_b:
        return UNIFORM[SUM]
    if a.kind == ROWS and b.kind == CONSTANT and not over_a:
        return rows(a.axis, None, a.merged)
    if a.kind == CONSTANT and b.kind == ROWS and not over_b:
        return rows(a_ndim - 1, None, b.merged)
    if ROWS not in (a.kind, b.kind) and CONSTANT in (a.kind, b.kind):
        return b if a.kind == CONSTANT else a
    return analysis.couple(node)


@rule(blas.BatchedDot)
def _batched_dot(analysis, node, inputs):
    a, b = inputs
    if a.kind == b.kind == ROWS and a.axis == 0 and aligned(inputs):
        return rows(0, None, a.merged)
    if (a.kind, b.kind, a.axis) == (ROWS, CONSTANT, 1) or (a.kind, b.kind, b.axis) == (CONSTANT, ROWS, 2):
        return rows(a.axis or b.axis)
    return analysis.couple(node)


@rule(abstract_conv.BaseAbstractConv)
def _convolution(analysis, node, inputs):
    backwards = isinstance(node.op, abstract_conv.AbstractConv_gradInputs)
    image, kernel = (inputs[1], inputs[0]) if backwards else inputs[:2]
    if image.kind == ROWS and image.axis == 0 and kernel.kind == CONSTANT:
        return rows(0, None, image.merged)
    return analysis.couple(node)


@rule(pool.Pool, neighbours.Images2Neibs)
def _pool(analysis, node, inputs):
    x, pooled = inputs[0], getattr(node.op, 'ndim', 2)
    if x.kind != ROWS or x.axis >= node.inputs[0].ndim - pooled or any(d.kind != CONSTANT for d in inputs[1:]):
        return analysis.couple(node)
    # Neighbourhoods are rows, those of one image in succession.
    return x if isinstance(node.op, pool.Pool) or x.axis == 0 else analysis.couple(node)
