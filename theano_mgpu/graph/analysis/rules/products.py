"""Products, convolutions and pooling."""
from __future__ import annotations

import copy

import theano
import theano.tensor as T
from theano import sparse
from theano.gof.graph import Apply
from theano.tensor import basic, blas, slinalg
from theano.tensor.nnet import abstract_conv, conv, neighbours
from theano.tensor.signal import pool

from ....compat.legacy_convolutions import as_abstract, has_steps
from ..reductions import SUM
from ..shards import OF_MATRIX, rule
from ..states import CONSTANT, ROWS, has_rows, partial, rows
from .base import all_rows, only_rows_on, refuse_rows, rows_along, same_order, same_rows, shares_of


@rule(basic.Dot, sparse.Dot, sparse.StructuredDot, is_costly=True, compares_lengths=True)
def _dot(shards, node, values):
    a, b = node.inputs
    shares = shares_of(values)
    if len(shares) == 1:
        share, other = values[shares[0]], values[1 - shares[0]]
        if other.kind == CONSTANT and share.state.reduction == SUM \
                and shards.stage(other.variable) <= shards.stage(share.variable) \
                and node.outputs[0].ndim <= node.inputs[shares[0]].ndim:
            return shards.apply(node, values, partial())
    values = shards.wholes(values)
    if not has_rows(values):
        return shards.constant(node, values)
    summed = [a.ndim - 1, max(0, b.ndim - 2)]
    if _have_to_meet(values, summed):  # as in ``dot(z, z.T)``: each replica gets all rows of one factor
        i = 0 if values[0].axis == summed[0] else 1
        return _dot(shards, node, [shards.gathered(value) if j == i else value for j, value in enumerate(values)])
    return _product(shards, node, values, summed, a.ndim - 1)


@rule(blas.BatchedDot, of=ROWS, is_costly=True, compares_lengths=True)
def _batched_dot(shards, node, values):
    a, b = values
    if all(value.kind != ROWS or value.axis == 0 for value in values):
        state = same_rows(shards, node, values)
        values = all_rows(shards, values, 0)
        return shards.apply(node, same_order(shards, node, values), state)
    summed = [a.variable.ndim - 1, 1]
    if _have_to_meet(values, summed):
        return _batched_dot(shards, node, [a, shards.gathered(b)])
    return _product(shards, node, values, summed, node.outputs[0].ndim - 1)


def _have_to_meet(values, summed):
    """Return whether both factors are rows, but not along the axes that are summed over, and in one order."""
    a, b = values
    return a.kind == b.kind == ROWS and \
        ([a.axis, b.axis] != summed or (a.state.outer is None) != (b.state.outer is None))


def _product(shards, node, values, summed, axis):
    """Return the Value of a product; rows of its second factor that are not summed over lie along `axis` of it."""
    rows_summed = [value for value, i in zip(values, summed) if value.axis == i]
    if rows_summed:  # a replica's sum over its own samples is a share of the whole sum
        outer, length = rows_summed[0].state.outer, shards.length(rows_summed[0])
        values = [shards.cut(value, i, outer, length) if value.kind == CONSTANT else value
                  for value, i in zip(values, summed)]
        return shards.apply(node, same_order(shards, node, values), partial())
    a, b = values
    return shards.apply(node, values, a.state if a.kind == ROWS else b.state._replace(axis=axis))


@rule(slinalg.Solve, of=ROWS, is_costly=True)
def _solve(shards, node, values):
    if values[0].kind == ROWS or values[1].axis == 0:
        shards.refuse(node, OF_MATRIX % 'Solve')
    return shards.apply(node, values, values[1].state)  # each column is solved for by itself


def any_number(node: Apply, inputs: list[theano.Variable], axis: int = 0) -> Apply:
    """Apply a convolution that does not know the number of its images, or of channels along axis 1.

    A ConvOp becomes an abstract convolution, unless `has_steps`.
    """
    if isinstance(node.op, conv.ConvOp):
        return T.patternbroadcast(as_abstract(node.op, *inputs), node.outputs[0].broadcastable).owner
    op = copy.copy(node.op)
    for name in ('imshp', 'kshp')[:1 + axis]:
        setattr(op, name, tuple(None if i == axis else size for i, size in enumerate(getattr(op, name))))
    return Apply(op, inputs, [output.type(output.name) for output in node.outputs])


@rule(abstract_conv.BaseAbstractConv, of=ROWS, is_costly=True, compares_lengths=True)
def _convolution(shards, node, values):
    refuse_rows(shards, node, values[2:], 'its sizes depend on single samples')
    anew = any_number(node, node.inputs)
    if isinstance(node.op, abstract_conv.AbstractConv_gradWeights):
        both, _ = rows_along(shards, node, values[:2], 0)
        return shards.apply(anew, all_rows(shards, both, 0) + values[2:], partial())
    image, kernel = (1, 0) if isinstance(node.op, abstract_conv.AbstractConv_gradInputs) else (0, 1)
    if image == 0 and values[1].axis == 1 and node.op.num_groups == 1:
        # The gradient of a ConvOp's kernels convolves images with gradients, over the samples in place of channels.
        both, _ = rows_along(shards, node, values, 1)
        return shards.apply(any_number(node, node.inputs, axis=1), all_rows(shards, both, 1), partial())
    refuse_rows(shards, node, [values[kernel]], 'its kernel is made of samples')
    _, state = rows_along(shards, node, [values[image]], 0)
    return shards.apply(anew, values, state)


@rule(conv.ConvOp, of=ROWS, is_costly=True)
def _legacy_convolution(shards, node, values):
    if has_steps(node.op):
        shards.refuse(node, 'it is the gradient of one with steps')
    return [shards.converted(any_number(node, node.inputs).outputs[0])]


@rule(pool.Pool, pool.PoolGrad, pool.DownsampleFactorMaxGradGrad, pool.MaxPoolRop, of=ROWS)
def _pool(shards, node, values):
    """Pool images, or derive the gradient; inputs are images, and arrays of the shape of the output, then sizes."""
    ndim = node.outputs[0].ndim
    n = sum(v.ndim == ndim for v in node.inputs)
    axis = next(value.axis for value in values if value.kind == ROWS)
    if axis >= ndim - node.op.ndim or has_rows(values[n:]):
        shards.refuse(node, 'it pools over samples')
    values, state = rows_along(shards, node, values, axis)
    return shards.apply(node, all_rows(shards, values[:n], axis) + values[n:], state)


@rule(neighbours.Images2Neibs, of=ROWS)
def _neighbours(shards, node, values):
    x, *sizes = values
    refuse_rows(shards, node, sizes, 'its sizes are made of samples')
    if x.axis == 2 and all(node.inputs[0].broadcastable[:2]) and node.op.mode in ('valid', 'ignore_borders'):
        # The gradient takes all neighbourhoods as one image; the neighbourhoods of one sample lie above each other.
        def checked(variable, height, step):
            each = variable.shape[2] // shards.own
            return shards.check(node, 'it reaches over samples', variable, T.eq(each % height[0], 0),
                                T.eq(height[0], step[0]), T.eq(variable.shape[2], each * shards.own))
        x = shards.make(checked, values, only_rows_on(shards, node, [x], 2), like=node.inputs[0])
        return shards.apply(node, [x] + sizes, rows(0))
    return shards.apply(node, values, only_rows_on(shards, node, [x], 0))
