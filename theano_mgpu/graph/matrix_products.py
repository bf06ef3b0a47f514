"""Matrix products in graphs."""
from __future__ import annotations

import theano
import theano.scalar as scal
from theano.tensor.basic import Dot
from theano.tensor.elemwise import DimShuffle, Elemwise

SCALED_BY = scal.mul, scal.true_div, scal.neg


def factors_of(variable: theano.Variable) -> tuple[theano.Variable, theano.Variable] | None:
    """Return the matrices of a product ``dot(left.T, right)``, as is the gradient of a dense layer's weights.

    The second one is scaled where the product is: by a learning rate, for example. Return None for another variable,
    and for matrices that no BLAS multiplies.
    """
    node = variable.owner
    if node is None or variable.dtype not in ('float32', 'float64'):
        return None
    if isinstance(node.op, Elemwise) and node.op.scalar_op in SCALED_BY:
        numbers = [all(each.broadcastable) for each in node.inputs]
        if sum(numbers) < len(numbers) - 1 or numbers[0] and node.op.scalar_op == scal.true_div or all(numbers):
            return None
        i = numbers.index(False)
        factors = factors_of(node.inputs[i])
        return factors and (factors[0], node.op(*node.inputs[:i], factors[1], *node.inputs[i + 1:]))
    if not isinstance(node.op, Dot):
        return None
    transposed, right = node.inputs
    if transposed.owner is None or not isinstance(transposed.owner.op, DimShuffle):
        return None
    left, = transposed.owner.inputs
    if tuple(transposed.owner.op.new_order) != (1, 0) or right.ndim != 2 or not left.dtype == right.dtype:
        return None
    return left, right
