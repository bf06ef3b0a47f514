"""Ops of theano.gpuarray that are wrong on a named context, on OpenCL, or on any GPU."""
from __future__ import annotations

import re
from typing import Any

from .wrapping import mark_version, wrap

OPENCL_SPELLING = (
    (re.compile(r'nan\(""\)'), 'NAN'),                        # maximum, minimum
    (re.compile(r'\b(floor|fmod)f\('), r'\1('),              # round, integer division
    (re.compile(r'(?<![<>=!])= \(?(\w+)\)? \?'), r'= (\1 != 0) ?'),  # cast to bool, switch: a float is no condition
)


def give_mrg_its_context() -> None:
    """Draw MRG random numbers on the context of their state; Theano 1.0.5 draws on the default context."""
    from theano.gpuarray.rng_mrg import GPUA_mrg_uniform

    @wrap(GPUA_mrg_uniform)
    def new(original, rstate, ndim, dtype, size):
        from theano.gpuarray.type import GpuArrayType
        from theano.tensor import as_tensor_variable, get_vector_length
        size = as_tensor_variable(size)
        ndim = get_vector_length(size) if ndim is None else ndim
        output_type = GpuArrayType(dtype, (False,) * ndim, context_name=rstate.type.context_name)
        return GPUA_mrg_uniform(output_type)(rstate, size)


def cast_conv_shapes() -> None:
    """Cast the image shape of a convolution's gradient to int64, as the CPU's op does.

    Theano 1.0.5 reads the shape as int64 on a GPU, whatever its dtype is.
    """
    from theano.gpuarray import blas
    for op_class in (blas.GpuCorrMM_gradInputs, blas.GpuCorrMM_gradWeights,
                     blas.GpuCorr3dMM_gradInputs, blas.GpuCorr3dMM_gradWeights):
        @wrap(op_class)
        def make_node(original, self, first, topgrad, shape=None):
            from theano.tensor import as_tensor_variable
            if shape is not None:
                shape = [as_tensor_variable(shape[i]).astype('int64') for i in range(len(self.subsample))]
            return original(self, first, topgrad, shape)


def name_the_type_of_contexts(module: Any) -> None:
    """Name the type of contexts in C code; Theano 1.0.5 takes its address, which differs from process to process.

    `module` is ``theano.gpuarray.type``. Ops take the name when their modules are imported, which comes next.
    """
    module.GpuContextType.__repr__ = lambda self: 'GpuContextType'


def replace_legacy_convolutions() -> None:
    """Replace ConvOp in functions for a GPU by the abstract convolution, which has ops there.

    ConvOp is the op of ``theano.tensor.nnet.conv.conv2d``. Gradients of a convolution with steps stay as they are.
    """
    from theano.gof import local_optimizer
    from theano.gof.opt import copy_stack_trace, out2in
    from theano.gpuarray.opt import gpu_seqopt
    from theano.tensor import patternbroadcast
    from theano.tensor.nnet.conv import ConvOp

    from .legacy_convolutions import as_abstract, has_steps

    @local_optimizer([ConvOp])
    def abstract_convolution(node):
        if not isinstance(node.op, ConvOp) or has_steps(node.op):  # out2in asks for each node
            return False
        output = as_abstract(node.op, *node.inputs)
        copy_stack_trace(node.outputs, output)
        return [patternbroadcast(output, node.outputs[0].broadcastable)]

    gpu_seqopt.register('replace_legacy_convolutions', out2in(abstract_convolution), -1,  # before all others
                        'fast_compile', 'fast_run', 'gpuarray')


def report_kernels_that_cannot_be_made() -> None:
    """Raise an error with the driver's reason where the kernel of an elementwise op cannot be made."""
    from theano.gpuarray.elemwise import GpuElemwise
    plain = 'PyErr_SetString(PyExc_RuntimeError, "Could not initialize elemwise support");'

    @wrap(GpuElemwise)
    def c_init_code_struct(original, self, node, name, sub):
        reason = 'PyErr_Format(PyExc_RuntimeError, "%s cannot be made: %%s", gpucontext_error(%s->ctx, GA_IMPL_ERROR));'
        return original(self, node, name, sub).replace(
            plain, reason % ('the kernel of an elementwise op', sub['params']))

    @wrap(GpuElemwise)
    def c_cleanup_code_struct(original, self, node, name):
        return 'if (ge != NULL) {%s}' % original(self, node, name)

    mark_version(GpuElemwise, lambda: (1,))


def build_kernels_when_called() -> None:
    """Build the kernels of an elementwise op at their first calls; Theano 1.0.5 builds all of them with the op.

    An op of n dimensions has 2 n + 1 kernels: one for contiguous arrays, and for each number of dimensions that is left
    where neighbours collapse, one with addresses of 32 bits and one with 64. Few are ever called. Here libgpuarray is
    told to build the kernels for 0 dimensions at once. It builds each other kernel before its first call.
    """
    from theano.gpuarray.elemwise import GpuElemwise
    from theano.gpuarray.subtensor import GpuAdvancedIncSubtensor1, GpuIncSubtensor
    for op_class in (GpuElemwise, GpuIncSubtensor, GpuAdvancedIncSubtensor1):
        @wrap(op_class)
        def c_init_code_struct(original, self, node, name, sub):
            return re.sub(r'args, [^,]+, GE_CONVERT_F16\)', 'args, 0, GE_CONVERT_F16)', original(self, node, name, sub))

        mark_version(op_class, lambda: (2,))


def spell_for_opencl() -> None:
    """Write elementwise kernels in OpenCL's language; Theano 1.0.5 writes some that only CUDA and C++ understand."""
    from theano.gpuarray.elemwise import GpuElemwise

    @wrap(GpuElemwise)
    def _generate_op_string(original, self, node):
        support_code, code = original(self, node)
        if _is_on_opencl(node):
            for pattern, replacement in OPENCL_SPELLING:
                code = pattern.sub(replacement, code)
        return support_code, code

    _keep_code_of_opencl_apart(GpuElemwise)


def clear_before_gemv() -> None:
    """Clear the output of a product of matrix and vector on OpenCL before it is computed.

    Theano 1.0.5 computes y = 0 * y + A x into uninitialised memory, and CLBlast does multiply y by 0.
    CLBlast's gemm, its batched gemm and its dot do not read their output where beta is 0; cuBLAS never does.
    """
    from theano.gpuarray.blas import GpuGemv

    @wrap(GpuGemv)
    def perform(original, self, node, inputs, out_storage, params):
        y, alpha, A, x, beta = inputs
        if _is_on_opencl(node) and beta == 0:
            y = y.copy()
            y[...] = 0
        original(self, node, [y, alpha, A, x, beta], out_storage, params)

    @wrap(GpuGemv)
    def c_code(original, self, node, name, inputs, outputs, sub):
        code = original(self, node, name, inputs, outputs, sub)
        if not _is_on_opencl(node):
            return code
        before, test, after = code.partition('if (PyGpuArray_DIM(%s, 1) == 0)' % inputs[2])
        clear = """
        if (((dtype_%(beta)s *)PyArray_DATA(%(beta)s))[0] == 0 && GpuArray_memset(&%(y)s->ga, 0) != GA_NO_ERROR) {
            PyErr_SetString(PyExc_RuntimeError, "Memset failed");
            %(fail)s
        }
        """ % {'beta': inputs[4], 'y': outputs[0], 'fail': sub['fail']}
        return before + clear + test + after

    _keep_code_of_opencl_apart(GpuGemv)


def let_the_last_row_remain() -> None:
    """Write the last of several rows that ``set_subtensor(x[ids], rows)`` sets at one id, as the CPU does.

    The blocks of Theano 1.0.5's kernel write their rows in any order. Here a block first looks for its id among the
    later ones, and leaves the row to the last block that has it.
    """
    from theano.gpuarray.subtensor import GpuAdvancedIncSubtensor1_dev20
    write, every_id = 'if (set_instead_of_inc) {', 'for (ga_int i = GID_0; i < numIndices; i += GDIM_0)\n             {'
    look = """
                  ga_int is_last = 1;
                  if (set_instead_of_inc) {
                      ga_ssize row = indices_arr[i * stridesIndices];
                      for (ga_int k = i + 1; k < numIndices && is_last; k++) {
                          ga_ssize later = indices_arr[k * stridesIndices];
                          is_last = later != row && later != row + (ga_ssize)numRowsX
                                    && later != row - (ga_ssize)numRowsX;
                      }
                  }"""

    @wrap(GpuAdvancedIncSubtensor1_dev20)
    def gpu_kernels(original, self, node, nodename):
        kernels = original(self, node, nodename)
        for kernel in kernels:
            kernel.code = kernel.code.replace(every_id, every_id + look)
            kernel.code = kernel.code.replace(write, 'if (!is_last) {\n                        } else ' + write)
        return kernels

    mark_version(GpuAdvancedIncSubtensor1_dev20, lambda: (3,))


def _is_on_opencl(node):
    return node.inputs[0].type.context.kind == b'opencl'


def _keep_code_of_opencl_apart(op_class):
    """Give an op's code on OpenCL a version of its own.

    Theano keeps compiled code by the name of the context, which may have been on CUDA, or without the patch, before.
    """
    mark_version(op_class, lambda node: (1,) * _is_on_opencl(node), 'c_code_cache_version_apply')
