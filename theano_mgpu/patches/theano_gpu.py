"""Ops of theano.gpuarray that are wrong on a named context, or on any GPU."""
import functools


def give_mrg_its_context():
    """Draw MRG random numbers on the context of their state; Theano 1.0.5 draws on the default context.

    Without this, on a named context: "context name None not defined", and all ops stay on the host.
    """
    from theano.gpuarray.rng_mrg import GPUA_mrg_uniform

    @classmethod
    def new(cls, rstate, ndim, dtype, size):
        from theano.gpuarray.type import GpuArrayType
        from theano.tensor import as_tensor_variable, get_vector_length
        size = as_tensor_variable(size)
        ndim = get_vector_length(size) if ndim is None else ndim
        output_type = GpuArrayType(dtype, (False,) * ndim, context_name=rstate.type.context_name)
        return cls(output_type)(rstate, size)
    GPUA_mrg_uniform.original_new, GPUA_mrg_uniform.new = GPUA_mrg_uniform.new, new


def cast_conv_shapes():
    """Cast the image shape of a convolution's gradient to int64, as the CPU's op does.

    Theano 1.0.5 reads the shape as int64 on a GPU, whatever its dtype is. Without this, a transposed convolution to
    a shape of Python integers (which Theano makes int8) asks for "4 x 2 x 442372112 x 404381200".
    """
    from theano.gpuarray import blas
    for op_class in (blas.GpuCorrMM_gradInputs, blas.GpuCorrMM_gradWeights,
                     blas.GpuCorr3dMM_gradInputs, blas.GpuCorr3dMM_gradWeights):
        _cast_conv_shape(op_class)


def _cast_conv_shape(op_class):
    original = op_class.make_node

    @functools.wraps(original)
    def make_node(self, first, topgrad, shape=None):
        from theano.tensor import as_tensor_variable
        if shape is not None:
            shape = [as_tensor_variable(shape[i]).astype('int64') for i in range(len(self.subsample))]
        return original(self, first, topgrad, shape)

    op_class.make_node = make_node


def name_the_type_of_contexts(module):
    """Name the type of contexts in C code; Theano 1.0.5 takes its address, which differs from process to process.

    `module` is ``theano.gpuarray.type``. Ops take the name when their modules are imported, which comes next.

    Without this, processes that compile an op of a GPU at the same time have different code for it. Both are kept, and
    each later process warns that "the same cache key is associated to different modules".
    """
    module.GpuContextType.__repr__ = lambda self: 'GpuContextType'


def report_kernels_that_cannot_be_made():
    """Have an elementwise op whose kernel cannot be made raise an error with the reason of the driver.

    Without this, Theano's code frees what it could not make, and the process ends in a segmentation fault.
    """
    from theano.gpuarray.elemwise import GpuElemwise
    make, free, version = (
        GpuElemwise.c_init_code_struct, GpuElemwise.c_cleanup_code_struct, GpuElemwise.c_code_cache_version)
    plain = 'PyErr_SetString(PyExc_RuntimeError, "Could not initialize elemwise support");'

    @functools.wraps(make)
    def c_init_code_struct(self, node, name, sub):
        reason = 'PyErr_Format(PyExc_RuntimeError, "%s cannot be made: %%s", gpucontext_error(%s->ctx, GA_IMPL_ERROR));'
        return make(self, node, name, sub).replace(plain, reason % ('the kernel of an elementwise op', sub['params']))

    @functools.wraps(free)
    def c_cleanup_code_struct(self, node, name):
        return 'if (ge != NULL) {%s}' % free(self, node, name)

    @functools.wraps(version)
    def c_code_cache_version(self):
        found = version(self)
        return found and found + (1,)

    GpuElemwise.c_init_code_struct, GpuElemwise.c_cleanup_code_struct, GpuElemwise.c_code_cache_version = (
        c_init_code_struct, c_cleanup_code_struct, c_code_cache_version)
