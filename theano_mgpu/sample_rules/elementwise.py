"""Elementwise ops."""
import numpy as np
import theano
from theano import sparse
from theano.compile import ops as compile_ops
from theano.gradient import DisconnectedGrad, GradClip, ZeroGrad
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt
from theano.tensor.nnet import bn

from ..dependence import (
    ACROSS,
    CONSTANT,
    COUNT,
    COUPLED,
    MEAN,
    NUMBER,
    ROWS,
    SCALED,
    SHIFTED,
    SIZES,
    STATISTICS,
    SUM,
    UNIFORM,
    rows,
    sizes,
)
from .base import LINEAR, aligned, combined, constant, product, rule


@rule(compile_ops.Rebroadcast, compile_ops.SpecifyShape, compile_ops.ViewOp, compile_ops.DeepCopyOp,
      basic.ScalarFromTensor, basic.TensorFromScalar, theano.printing.Print, opt.Assert, DisconnectedGrad, GradClip,
      ZeroGrad, sparse.DenseFromSparse, sparse.SparseFromDense)
def _first(analysis, node, inputs):
    return inputs[0]


@rule(bn.AbstractBatchNormInference)
def _normalisation_by_given(analysis, node, inputs):
    return inputs[0] if all(d.kind == CONSTANT for d in inputs[1:]) else analysis.couple(node)


@rule(elemwise.Elemwise)
def _elemwise(analysis, node, inputs):
    op = node.op.scalar_op
    if isinstance(op, scalar.Second):  # fill: the second input, in the shape of the first
        return _filled(analysis, node, inputs) if inputs[0].kind == ROWS else inputs[1]
    if isinstance(op, (scalar.Identity, scalar.Cast)) and not _rounds(node, inputs[0]):
        return inputs[0]
    with_rows = [d for d in inputs if d.kind == ROWS]
    if with_rows:
        return _elemwise_of_rows(analysis, node, inputs, with_rows)
    if any(d.kind == SIZES for d in inputs):
        return _elemwise_of_sizes(analysis, node, inputs)
    return _of_statistics(analysis, node, inputs)


def _filled(analysis, node, inputs):
    shaped, value = inputs
    if value.kind == ROWS:
        return _elemwise_of_rows(analysis, node, inputs, [value, shaped])
    if value.kind in (SIZES, NUMBER):
        return analysis.couple(node)
    if node.inputs[1].type.broadcastable[shaped.axis]:
        return shaped._replace(filled=value.kind)
    return shaped._replace(filled=None) if value.kind == CONSTANT else analysis.couple(node)


def _rounds(node, x):
    """Whether a cast does not keep every number: to whole numbers of others, or to booleans; counts are whole."""
    if isinstance(node.op.scalar_op, scalar.Identity):
        return False
    kinds = [np.dtype(v.dtype).kind for v in (node.inputs[0], node.outputs[0])]
    return kinds[0] == 'f' and kinds[1] != 'f' and x.kind not in (COUNT, SIZES) or kinds[0] != 'b' and kinds[1] == 'b'


def _elemwise_of_rows(analysis, node, inputs, with_rows):
    axis, varying = with_rows[0].axis, [d for d in with_rows if d.filled != CONSTANT] or with_rows
    merged = varying[0].merged
    on_one_axis = aligned(varying) and all(d.axis == axis for d in with_rows)
    if on_one_axis and _shifts(node, inputs, axis):
        return rows(axis, SHIFTED, merged)
    if on_one_axis and all(d.filled not in (None, SHIFTED) or d.kind not in (ROWS, SIZES)
                           and v.type.broadcastable[axis] for d, v in zip(inputs, node.inputs)):
        found = _of_statistics(analysis, node, [UNIFORM[d.filled or d.kind] for d in inputs])
        return rows(axis, found.kind if found.kind in UNIFORM else COUPLED, merged)
    if not on_one_axis or any(d.filled in ACROSS or d.kind in STATISTICS + (SCALED, SIZES, NUMBER) for d in inputs):
        # Pairs of samples, or rows against a number that is another one on each replica.
        analysis.couple(node)
    return rows(axis, None, merged)


def _shifts(node, inputs, axis):
    """Whether the output is made of rows, each with the same mean over samples added, or goes on with such rows."""
    op, kinds = node.op.scalar_op, []
    for d, v in zip(inputs, node.inputs):
        if d.kind == MEAN and not v.type.broadcastable[axis]:
            return False
        kinds.append(d.filled or d.kind)  # ROWS for those with nothing but their own samples in them
    if isinstance(op, LINEAR + (scalar.Neg,)):
        return set(kinds) <= {ROWS, SHIFTED, MEAN, CONSTANT} and \
            (SHIFTED in kinds or ROWS in kinds and MEAN in kinds)
    if isinstance(op, scalar.Mul):
        return sorted(kinds) == [CONSTANT] * (len(kinds) - 1) + [SHIFTED]
    return isinstance(op, scalar.TrueDiv) and kinds == [SHIFTED, CONSTANT]


def _elemwise_of_sizes(analysis, node, inputs):
    lengths = {len(d.elements) for d in inputs if d.kind == SIZES}
    if len(lengths) > 1 or node.outputs[0].ndim != 1:
        return analysis.couple(node)
    elements = [[d.elements[i] if d.kind == SIZES else d for d in inputs] for i in range(lengths.pop())]
    return sizes([_of_statistics(analysis, node, element) for element in elements])


def _of_statistics(analysis, node, inputs):
    """Dependence of an elementwise function of sums, means and constants."""
    op, kinds = node.op.scalar_op, [d.kind for d in inputs]
    if set(kinds) == {CONSTANT}:
        return UNIFORM[CONSTANT]
    found = None
    if COUPLED in kinds:
        return UNIFORM[COUPLED]
    if NUMBER in kinds or SCALED in kinds and isinstance(op, LINEAR + (scalar.Switch,)):
        found = None
    elif isinstance(op, LINEAR):
        found = combined(kinds, node.inputs)
    elif isinstance(op, scalar.Neg):
        found = kinds[0]
    elif isinstance(op, scalar.Second):
        found = kinds[1]
    elif isinstance(op, scalar.Switch) and kinds[0] == CONSTANT:
        condition = constant(node.inputs[0])
        found = combined(kinds[1:], node.inputs[1:]) if condition is None else kinds[1 if condition else 2]
    elif isinstance(op, scalar.Mul):
        found = product(kinds)
    elif isinstance(op, scalar.TrueDiv):
        found = {(SUM, COUNT): MEAN, (COUNT, COUNT): CONSTANT, (SCALED, COUNT): SUM}.get(
            tuple(kinds), kinds[0] if kinds[1] == CONSTANT else None)
    if found is None and set(kinds) <= {CONSTANT, COUNT, NUMBER} \
            and all(np.dtype(v.dtype).kind in 'iu' for v in node.inputs + node.outputs):
        return UNIFORM[NUMBER]
    return UNIFORM[found] if found else analysis.couple(node)
