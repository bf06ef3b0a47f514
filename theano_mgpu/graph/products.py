"""Matrix products in graphs."""
from __future__ import annotations

import theano
from theano.tensor.basic import Dot
from theano.tensor.elemwise import DimShuffle


def factors_of(variable: theano.Variable) -> tuple[theano.Variable, theano.Variable] | None:
    """Return the matrices of a product ``dot(left.T, right)``, as is the gradient of a dense layer's weights.

    Return None for another variable, and for matrices that no BLAS multiplies.
    """
    if variable.owner is None or not isinstance(variable.owner.op, Dot):
        return None
    transposed, right = variable.owner.inputs
    if transposed.owner is None or not isinstance(transposed.owner.op, DimShuffle):
        return None
    left, = transposed.owner.inputs
    if tuple(transposed.owner.op.new_order) != (1, 0) or right.ndim != 2 or \
            not left.dtype == right.dtype == variable.dtype in ('float32', 'float64'):
        return None
    return left, right
