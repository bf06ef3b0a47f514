"""Ops that look for a number in another array, such as the gradient of a maximum: there the last bit counts."""
from __future__ import annotations

import theano
from theano.scalar.basic import EQ, GE, GT, LE, LT, NEQ
from theano.tensor.elemwise import Elemwise
from theano.tensor.signal.pool import DownsampleFactorMaxGradGrad, MaxPoolGrad, MaxPoolRop

COMPARISONS = EQ, NEQ, LT, GT, LE, GE


def compares(node: theano.Apply) -> bool:
    """Return whether an op gives another result where an input is computed a second time, and rounded differently.

    The gradient of max-pooling goes to those pixels that are equal to the largest one, the gradient of ``max`` to the
    elements that are equal to the largest one. A comparison with a constant, as of a ReLU with 0, does not count: its
    kink is the one that it has on one device.
    """
    if isinstance(node.op, (MaxPoolGrad, DownsampleFactorMaxGradGrad, MaxPoolRop)):
        return True
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, COMPARISONS) and \
        all(v.dtype.startswith('float') and not _is_number(v) for v in node.inputs)


def _is_number(variable):
    """Return whether a variable is a constant, in whatever shape."""
    while variable.owner and len(variable.owner.inputs) == 1:
        variable, = variable.owner.inputs
    return isinstance(variable, theano.Constant)
