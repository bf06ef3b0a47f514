"""Convolutions whose ops may know the number of samples, made for any number."""
from __future__ import annotations

import copy
from typing import Any

import theano
from theano.gof.graph import Apply
from theano.tensor.nnet.conv import ConvOp

ATTRIBUTES = ('imshp', 'kshp', 'nkern', 'bsize', 'dx', 'dy', 'imshp_logical', 'kshp_logical',
              'kshp_logical_top_aligned', 'verbose', 'version', 'direction_hint', 'openmp')


def any_number_of_images(node: theano.Apply, inputs: list[theano.Variable]) -> theano.Apply:
    """Apply an abstract convolution that does not know the number of images."""
    op = copy.copy(node.op)
    op.imshp = (None,) + tuple(op.imshp[1:])
    return _applied(op, node, inputs)


def of_any_number_of_images(node: theano.Apply, inputs: list[theano.Variable]) -> theano.Apply:
    """Apply a ConvOp that does not know the number of images."""
    return _applied(_changed(node.op, bsize=None), node, inputs)


def of_any_number_of_channels(node: theano.Apply, inputs: list[theano.Variable]) -> theano.Apply:
    """Apply a ConvOp that does not know the number of channels."""
    op = node.op
    op = _changed(op, imshp=(None,) + op.imshp[1:], imshp_logical=(None,) + op.imshp_logical[1:])
    return _applied(op, node, inputs)


def _changed(op: ConvOp, **changes: Any) -> ConvOp:
    return ConvOp(**{**{name: getattr(op, name) for name in ATTRIBUTES}, 'output_mode': op.out_mode, **changes})


def _applied(op, node, inputs):
    return Apply(op, inputs, [output.type(output.name) for output in node.outputs])
