"""The rules of `samples`: for each op, how its outputs depend on the samples if its inputs do."""
from theano.compile import ops as compile_ops
from theano.tensor import basic, elemwise, opt, subtensor

from ..dependence import ACROSS, CONSTANT, DRAWN, NUMBER, PLACES, ROWS, SCALED, UNIFORM, rows
from . import control_flow, elementwise, indexing, reductions, shapes  # noqa: F401  (each registers its rules)
from .base import DRAWS, RULES
from .shapes import of_drawn

# What may take the places of samples: each sample picks of its own row.
INDEXING = (subtensor.AdvancedSubtensor, subtensor.AdvancedIncSubtensor, compile_ops.Shape, compile_ops.Shape_i)
# What may take whole numbers that are no multiples of the number of samples: sizes of what is drawn.
SIZING = (elemwise.Elemwise, elemwise.DimShuffle, opt.MakeVector, basic.Join, basic.ScalarFromTensor,
          basic.TensorFromScalar, subtensor.Subtensor) + DRAWS
# What may take rows that are filled with a statistic, or shifted by one.
KEEPS_FILLED = (elemwise.Elemwise, elemwise.DimShuffle, elemwise.CAReduce, basic.Reshape, basic.Flatten,
                basic.Rebroadcast, basic.Alloc, subtensor.Subtensor, compile_ops.Shape, compile_ops.Shape_i)


def outcome(analysis, node, inputs):
    """Dependence of a node's outputs: one for all, or a list."""
    if all(d.kind == CONSTANT for d in inputs):
        return UNIFORM[CONSTANT]
    if any(d.kind == PLACES for d in inputs) and not isinstance(node.op, INDEXING):
        return analysis.couple(node, 'computes with the places of samples in the batch')
    if any(d.kind == DRAWN for d in inputs):
        return of_drawn(analysis, node, inputs)
    if any(d.kind == NUMBER for d in inputs) and not isinstance(node.op, SIZING):
        return analysis.couple(node)
    if any(d.kind == SCALED for d in inputs) and not isinstance(node.op, (elemwise.Elemwise, elemwise.DimShuffle)):
        return analysis.couple(node)
    if any(d.filled in ACROSS for d in inputs) and not isinstance(node.op, KEEPS_FILLED):
        return analysis.couple(node)
    known = RULES.of(node.op)
    if known:
        return known(analysis, node, inputs)
    found = analysis.couple(node, 'is computed by %s, of which it is not known whether it mixes samples'
                            % type(node.op).__name__)
    ndim = getattr(node.outputs[0].type, 'ndim', 0)
    return rows() if ndim and any(d.kind == ROWS for d in inputs) else found
