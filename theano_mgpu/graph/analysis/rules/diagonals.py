"""Diagonals of matrices, such as of all pairs of samples: there a replica has the rows of its own samples."""
import theano.tensor as T
from theano.tensor import basic, extra_ops, nlinalg

from ..shards import rule
from ..states import ROWS, rows
from .shapes import whole_length

NOT_SQUARE = 'the matrix does not have as many rows as columns'
SHIFTED = 'the diagonal is not the main one of all samples'


@rule(basic.ExtractDiag, of=ROWS)
def _extract(shards, node, values):
    x, = values
    axes = [axis % node.inputs[0].ndim for axis in (node.op.axis1, node.op.axis2)]
    if x.axis not in axes:
        return shards.apply(node, [x], x.state._replace(axis=x.axis - sum(axis < x.axis for axis in axes)))
    if node.op.offset or x.state.outer is not None:
        shards.refuse(node, SHIFTED)
    other = axes[1 - axes.index(x.axis)]

    def local(variable):
        """Return the diagonal of the columns of the replica's own samples."""
        each = variable.shape[x.axis] // shards.own
        variable = shards.check(node, NOT_SQUARE, variable, T.eq(variable.shape[other], each * shards.total))
        columns = slice(shards.first * each, (shards.first + shards.own) * each)
        return node.op(variable[(slice(None),) * other + (columns,)])
    return [shards.make(local, [x], rows(node.outputs[0].ndim - 1), like=node.outputs[0])]


@rule(basic.AllocDiag, nlinalg.AllocDiag, of=ROWS)
def _alloc(shards, node, values):
    x, = values
    if getattr(node.op, 'offset', 0) or x.state.outer is not None or node.inputs[0].ndim != 1:
        shards.refuse(node, SHIFTED)

    def local(variable):
        on_diagonal = _is_on_diagonal(shards, variable.shape[0], whole_length(shards, variable, 0), 0)
        return T.switch(on_diagonal, variable.dimshuffle(0, 'x'), T.zeros((), variable.dtype))
    return [shards.make(local, [x], rows(), like=node.outputs[0])]


@rule(extra_ops.FillDiagonal, of=ROWS)
def _fill(shards, node, values):
    x = values[0]
    if node.inputs[0].ndim != 2 or x.state.outer is not None:
        shards.refuse(node, SHIFTED)

    def local(variable, number):
        square = T.eq(variable.shape[1 - x.axis], whole_length(shards, variable, x.axis))
        variable = shards.check(node, NOT_SQUARE, variable, square)
        on_diagonal = _is_on_diagonal(shards, variable.shape[x.axis], variable.shape[1 - x.axis], x.axis)
        return T.switch(on_diagonal, number, variable)
    return [shards.make(local, values, x.state, like=node.outputs[0])]


def _is_on_diagonal(shards, own, length, axis):
    """Return where the diagonal of a square matrix lies in the replica's rows, which lie along an axis."""
    places = T.arange(own) + shards.first * (own // shards.own)
    across = T.arange(length)
    return T.eq(places.dimshuffle(0, 'x'), across.dimshuffle('x', 0)) if axis == 0 else \
        T.eq(across.dimshuffle(0, 'x'), places.dimshuffle('x', 0))
