"""Diagonals of matrices, such as of all pairs of samples: there a replica has the rows of its own samples."""
import theano.tensor as T
from theano.tensor import basic, extra_ops, nlinalg

from ..shards import rule
from ..states import ROWS

SHORT = 'the diagonal does not reach all samples'
SHIFTED = 'the diagonal is not the main one of all samples'


@rule(basic.ExtractDiag, of=ROWS)
def _extract(shards, node, values):
    x, state = node.inputs[0], values[0].state
    axes = [axis % x.ndim for axis in (node.op.axis1, node.op.axis2)]
    if state.axis not in axes:
        return shards.apply(node, values, state._replace(axis=state.axis - sum(axis < state.axis for axis in axes)))
    if node.op.offset or state.outer is not None:
        shards.refuse(node, SHIFTED)
    other = axes[1 - axes.index(state.axis)]
    x = shards.check(node, SHORT, x, T.ge(x.shape[other], x.shape[state.axis]))
    diagonal = T.switch(_on_diagonal(x, *axes), x, 0).sum(axis=other)  # all but one are 0
    order = [i for i in range(x.ndim) if i not in axes] + [state.axis]
    return [shards.converted(T.cast(diagonal.dimshuffle([i - (i > other) for i in order]), x.dtype))]


@rule(basic.AllocDiag, nlinalg.AllocDiag, of=ROWS)
def _alloc(shards, node, values):
    x, = node.inputs
    if getattr(node.op, 'offset', 0) or values[0].state.outer is not None or x.ndim != 1:
        shards.refuse(node, SHIFTED)
    square = T.alloc(x, x.shape[0], x.shape[0]).T
    return [shards.converted(T.switch(_on_diagonal(square, 0, 1), square, T.zeros((), x.dtype)))]


@rule(extra_ops.FillDiagonal, of=ROWS)
def _fill(shards, node, values):
    x, number = node.inputs
    if x.ndim != 2 or values[0].state.outer is not None:
        shards.refuse(node, SHIFTED)
    return [shards.converted(T.switch(_on_diagonal(x, 0, 1), number, x))]


def _on_diagonal(x, *axes):
    """Return where the elements have the same place along two axes."""
    return T.eq(*[T.arange(x.shape[axis]).dimshuffle([0 if i == axis else 'x' for i in range(x.ndim)])
                  for axis in axes])
