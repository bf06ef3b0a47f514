"""Convolutions whose ops may know the number of samples, made for any number."""
from __future__ import annotations

import copy

import theano
from theano.gof.graph import Apply
from theano.tensor import patternbroadcast
from theano.tensor.nnet.conv import ConvOp

from ...compat.legacy_convolutions import as_abstract


def any_number(node: theano.Apply, inputs: list[theano.Variable], axis: int = 0) -> theano.Apply:
    """Apply a convolution that does not know the number of its images, or of channels along axis 1.

    A ConvOp becomes an abstract convolution, unless `has_steps`.
    """
    if isinstance(node.op, ConvOp):
        return patternbroadcast(as_abstract(node.op, *inputs), node.outputs[0].broadcastable).owner
    op = copy.copy(node.op)
    for name in ('imshp', 'kshp')[:1 + axis]:
        setattr(op, name, tuple(None if i == axis else size for i, size in enumerate(getattr(op, name))))
    return Apply(op, inputs, [output.type(output.name) for output in node.outputs])
