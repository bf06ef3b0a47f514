"""The convolution of `theano.tensor.nnet.conv.conv2d`, whose op may know the number of samples."""
from theano.gof.graph import Apply
from theano.tensor.nnet.conv import ConvOp


def of_any_number_of_images(node, inputs):
    """A ConvOp that does not know the number of images, applied."""
    return _applied(node, inputs, bsize=None)


def of_any_number_of_channels(node, inputs):
    """A ConvOp that does not know the number of channels, applied."""
    op = node.op
    return _applied(node, inputs, imshp=(None,) + op.imshp[1:], imshp_logical=(None,) + op.imshp_logical[1:])


def _applied(node, inputs, **changes):
    given = {name: getattr(node.op, name) for name in (
        'imshp', 'kshp', 'nkern', 'bsize', 'dx', 'dy', 'imshp_logical', 'kshp_logical', 'kshp_logical_top_aligned',
        'verbose', 'version', 'direction_hint', 'openmp')}
    op = ConvOp(**{**given, 'output_mode': node.op.out_mode, **changes})
    return Apply(op, inputs, [output.type(output.name) for output in node.outputs])
