"""Ops of theano.gpuarray that are right on CUDA only."""
import functools
import re

OPENCL_SPELLING = (
    (re.compile(r'nan\(""\)'), 'NAN'),                        # maximum, minimum
    (re.compile(r'\b(floor|fmod)f\('), r'\1('),              # round, integer division
    (re.compile(r'(?<![<>=!])= \(?(\w+)\)? \?'), r'= (\1 != 0) ?'),  # cast to bool, switch: a float is no condition
)


def spell_for_opencl():
    """Write elementwise kernels in OpenCL's language; Theano 1.0.5 writes some that only CUDA and C++ understand.

    Without this, maximum, minimum, round, // and a float as a condition end the whole process on OpenCL: the kernel
    does not build ("1 error generated"), and Theano frees what was never allocated.
    """
    from theano.gpuarray.elemwise import GpuElemwise
    generate = GpuElemwise._generate_op_string

    @functools.wraps(generate)
    def _generate_op_string(self, node):
        support_code, code = generate(self, node)
        if _is_on_opencl(node):
            for pattern, replacement in OPENCL_SPELLING:
                code = pattern.sub(replacement, code)
        return support_code, code

    GpuElemwise._generate_op_string = _generate_op_string
    _keep_code_of_opencl_apart(GpuElemwise)


def clear_before_gemv():
    """Clear the output of a product of matrix and vector on OpenCL before it is computed.

    Theano 1.0.5 computes y = 0 * y + A x into uninitialised memory, and CLBlast does multiply y by 0. Without this, the
    product is NaN wherever the memory happened to hold NaN. CLBlast's gemm, its batched gemm and its dot do not read
    their output where beta is 0; cuBLAS never does.
    """
    from theano.gpuarray.blas import GpuGemv
    original, perform_original = GpuGemv.c_code, GpuGemv.perform

    @functools.wraps(perform_original)
    def perform(self, node, inputs, out_storage, params):
        y, alpha, A, x, beta = inputs
        if _is_on_opencl(node) and beta == 0:
            y = y.copy()
            y[...] = 0
        perform_original(self, node, [y, alpha, A, x, beta], out_storage, params)

    @functools.wraps(original)
    def c_code(self, node, name, inputs, outputs, sub):
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

    GpuGemv.perform, GpuGemv.c_code = perform, c_code
    _keep_code_of_opencl_apart(GpuGemv)


def _is_on_opencl(node):
    return node.inputs[0].type.context.kind == b'opencl'


def _keep_code_of_opencl_apart(op_class):
    """Give an op's code on OpenCL a version of its own.

    Theano keeps compiled code by the name of the context, which may have been on CUDA, or without the patch, before.
    """
    version = op_class.c_code_cache_version_apply

    @functools.wraps(version)
    def c_code_cache_version_apply(self, node):
        original = version(self, node)
        return original and original + (1,) * _is_on_opencl(node)

    op_class.c_code_cache_version_apply = c_code_cache_version_apply
