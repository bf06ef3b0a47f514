"""Ops of theano.gpuarray."""
import functools


def give_mrg_its_context(op_class):
    """Theano 1.0.5 makes each MRG draw for the default context, whatever the context of its state.

    Without this, on a named context: "context name None not defined", and all ops stay on the host.
    """
    @classmethod
    def new(cls, rstate, ndim, dtype, size):
        from theano.gpuarray.type import GpuArrayType
        from theano.tensor import as_tensor_variable, get_vector_length
        size = as_tensor_variable(size)
        ndim = get_vector_length(size) if ndim is None else ndim
        output_type = GpuArrayType(dtype, (False,) * ndim, context_name=rstate.type.context_name)
        return cls(output_type)(rstate, size)
    op_class.unmended_new, op_class.new = op_class.new, new


def cast_conv_shape(op_class):
    """Theano 1.0.5 reads a gradient's image shape as int64 on a GPU, whatever integer it is.

    Without this, the transposed convolution to a shape of Python integers (which Theano makes
    int8) asks for "4 x 2 x 442372112 x 404381200". The CPU's op casts, as this does.
    """
    original = op_class.make_node

    @functools.wraps(original)
    def make_node(self, first, topgrad, shape=None):
        from theano.tensor import as_tensor_variable
        if shape is not None:
            shape = [as_tensor_variable(shape[i]).astype('int64') for i in range(len(self.subsample))]
        return original(self, first, topgrad, shape)

    op_class.make_node = make_node
