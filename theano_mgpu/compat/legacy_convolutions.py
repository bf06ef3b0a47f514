"""The op of ``theano.tensor.nnet.conv.conv2d``, as an abstract convolution."""
from __future__ import annotations

import theano.tensor as T
from theano.tensor.nnet.abstract_conv import AbstractConv2d, AbstractConv2d_gradInputs
from theano.tensor.nnet.conv import ConvOp


def has_steps(op: ConvOp) -> bool:
    """Return whether an op is the gradient of a convolution with steps: no abstract one has its inputs."""
    return op.imshp[1:] != op.imshp_logical[1:] or op.kshp != op.kshp_logical


def as_abstract(op: ConvOp, images: T.TensorVariable, kernels: T.TensorVariable) -> T.TensorVariable:
    """Return the abstract convolution, which does not check its inputs against the shapes that a ConvOp has.

    A full convolution is most often a gradient, and becomes one: of a valid convolution with respect to its images. As
    a convolution of images with a border it would copy each image once for each element of a kernel.
    """
    if op.out_mode == 'full' and (op.dx, op.dy) == (1, 1):
        sizes = T.stack([images.shape[axis] + kernels.shape[axis] - 1 for axis in (2, 3)])
        gradient = AbstractConv2d_gradInputs((None,) * 4, (None,) * 4, border_mode='valid', filter_flip=False)
        return gradient(kernels.dimshuffle(1, 0, 2, 3), images, sizes)
    return AbstractConv2d(border_mode=op.out_mode, subsample=(op.dx, op.dy))(images, kernels)
