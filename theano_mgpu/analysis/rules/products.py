"""Products, convolutions and pooling."""
import theano.tensor as T
from theano import sparse
from theano.tensor import basic, blas
from theano.tensor.nnet import abstract_conv, conv, neighbours
from theano.tensor.signal import pool

from ..convolutions import of_any_number_of_channels, of_any_number_of_images
from ..reductions import SUM
from ..shards import rule
from ..sizes import any_number_of_images
from ..states import CONSTANT, PARTIAL, ROWS, partial, rows
from .base import constants, only_rows_on, rows_along, same_order, same_rows, wholes


@rule(basic.Dot, sparse.Dot, sparse.StructuredDot)
def _dot(shards, node, values):
    a, b = node.inputs
    shares = [i for i, value in enumerate(values) if value.kind == PARTIAL]
    if shares:
        value, other = values[shares[0]], values[1 - shares[0]]
        if len(shares) == 1 and other.kind == CONSTANT and value.state.reduction == SUM and other.stage <= value.stage \
                and node.outputs[0].ndim <= node.inputs[shares[0]].ndim:
            return shards.apply(node, values, partial())
        values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    over = [values[0].kind == ROWS and values[0].axis == a.ndim - 1,
            values[1].kind == ROWS and values[1].axis == max(0, b.ndim - 2)]
    if any(over):  # summed over samples: of what each replica has, the sum is its share
        i = over.index(True)
        other = values[1 - i]
        if other.kind == CONSTANT:
            other = shards.cut(other, max(0, b.ndim - 2) if i == 0 else a.ndim - 1, values[i].state.outer)
        elif not all(over) or (values[0].state.outer is None) != (values[1].state.outer is None):
            return _with_all_rows(shards, node, values, i)
        both = [other if j != i else values[i] for j in (0, 1)]
        return shards.apply(node, same_order(shards, node, both), partial())
    if values[0].kind == values[1].kind == ROWS:
        return _with_all_rows(shards, node, values, 1)
    if values[0].kind == ROWS:
        return shards.apply(node, values, values[0].state)
    return shards.apply(node, values, values[1].state._replace(axis=a.ndim - 1))


def _with_all_rows(shards, node, values, i):
    """Each replica gets all rows of an input, as of ``dot(z, z.T)``; then the product goes its usual way."""
    values = list(values)
    values[i] = shards.gathered(values[i])
    return _dot(shards, node, values)


@rule(blas.BatchedDot)
def _batched_dot(shards, node, values):
    values = wholes(shards, values)
    a, b = values
    found = [value for value in values if value.kind == ROWS]
    if not found:
        return shards.constant(node, values)
    if {value.axis for value in found} == {0}:
        state = same_rows(shards, node, values)
        values = [shards.cut(value, 0, state.outer) if value.kind == CONSTANT else value for value in values]
        return shards.apply(node, same_order(shards, node, values), state)
    summed = [a.variable.ndim - 1, 1]  # axes
    over = [value.axis == axis for value, axis in zip(values, summed)]
    if len(found) == 2 and not (all(over) and (a.state.outer is None) == (b.state.outer is None)):
        return _batched_dot(shards, node, [a, shards.gathered(b)])
    if any(over):
        values = [shards.cut(value, axis, found[0].state.outer) if value.kind == CONSTANT else value
                  for value, axis in zip(values, summed)]
        return shards.apply(node, same_order(shards, node, values), partial())
    return shards.apply(node, values, a.state if a.kind == ROWS else
                        b.state._replace(axis=node.outputs[0].ndim - 1))


@rule(abstract_conv.BaseAbstractConv)
def _convolution(shards, node, values):
    values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    if any(value.kind == ROWS for value in values[2:]):
        shards.refuse(node, 'its sizes depend on single samples')
    if isinstance(node.op, abstract_conv.AbstractConv_gradWeights):
        both, state = rows_along(shards, node, values[:2], 0)
        both = [shards.cut(value, 0, state.outer) if value.kind == CONSTANT else value for value in both]
        return shards.apply(any_number_of_images(node, node.inputs), both + values[2:], partial())
    image, kernel = (1, 0) if isinstance(node.op, abstract_conv.AbstractConv_gradInputs) else (0, 1)
    if values[kernel].kind == ROWS:
        shards.refuse(node, 'its kernel is made of samples')
    _, state = rows_along(shards, node, [values[image]], 0)
    return shards.apply(any_number_of_images(node, node.inputs), values, state)


@rule(conv.ConvOp)
def _legacy_convolution(shards, node, values):
    values = wholes(shards, values)
    if not any(value.kind == ROWS for value in values):
        return shards.constant(node, values)
    if node.op.imshp[1:] != node.op.imshp_logical[1:] or node.op.kshp != node.op.kshp_logical:
        shards.refuse(node, 'it is the gradient of one with steps')
    if values[0].axis == 0 and values[1].kind == CONSTANT:
        return shards.apply(of_any_number_of_images(node, node.inputs), values, values[0].state)
    # The gradient of kernels convolves images with gradients, over the samples in place of channels.
    values, state = rows_along(shards, node, values, 1)
    values = [shards.cut(value, 1, state.outer) if value.kind == CONSTANT else value for value in values]
    return shards.apply(of_any_number_of_channels(node, node.inputs), values, partial())


@rule(pool.Pool, pool.PoolGrad, pool.DownsampleFactorMaxGradGrad, pool.MaxPoolRop)
def _pool(shards, node, values):
    """Pooling and its gradients take images first, and those of one shape; then sizes."""
    values = wholes(shards, values)
    found = [value for value in values if value.kind == ROWS]
    if not found:
        return shards.constant(node, values)
    axis = found[0].axis
    images = [i for i, v in enumerate(node.inputs) if v.ndim == node.outputs[0].ndim]
    if axis >= node.outputs[0].ndim - node.op.ndim or any(values[i].kind == ROWS for i in range(len(values))
                                                         if i not in images):
        shards.refuse(node, 'it pools over samples')
    values, state = rows_along(shards, node, values, axis)
    values = [shards.cut(value, axis, state.outer) if i in images and value.kind == CONSTANT else value
              for i, value in enumerate(values)]
    return shards.apply(node, values, state)


@rule(neighbours.Images2Neibs)
def _neighbours(shards, node, values):
    x, *sizes = values[:1] + constants(shards, node, values[1:], 'its sizes are made of samples')
    if x.kind == PARTIAL:
        x = shards.whole(x)
    if x.kind == CONSTANT:
        return shards.constant(node, [x] + sizes)
    if x.axis == 2 and all(node.inputs[0].broadcastable[:2]) and node.op.mode in ('valid', 'ignore_borders'):
        # The gradient takes all neighbourhoods as one image, in which those of a sample lie above each other.
        def checked(variable, height, step):
            each = variable.shape[2] // shards.own
            return shards.check(node, 'it reaches over samples', variable, T.eq(each % height[0], 0),
                                T.eq(height[0], step[0]), T.eq(variable.shape[2], each * shards.own))
        x = shards.make(checked, [x] + sizes, only_rows_on(shards, node, [x], 2), like=node.inputs[0])
        return shards.apply(node, [x] + sizes, rows(0))
    return shards.apply(node, [x] + sizes, only_rows_on(shards, node, [x], 0))
