"""NumPy 2 under Theano 1.0.5 and Keras 2.3.1: its names, its C interface, and its rules of promotion (NEP 50).

NumPy 1 gave the result of an operation a type by the values of Python's numbers and of arrays without dimensions. NumPy
2 gives it a type by their types alone, and refuses Python's integers that a type cannot hold. Theano and Keras rely on
the old rules in a few places, where these functions restore their results. With NumPy 1 none of them is called: see
`table.NUMPY_2`.
"""
from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

from .wrapping import wrap

# Theano's C code reads fields of NumPy's structs, which the interface of NumPy 2 alone permits, and has names that the
# header npy_3kcompat.h of NumPy 1 defined.
OPTIONS = ['-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION', '-DNPY_PY3K', '-DPyInt_Check=PyLong_Check',
           '-DPyInt_AsLong=PyLong_AsLong', '-DPyInt_FromLong=PyLong_FromLong']
ALL_AXES = -2 ** 31  # NPY_RAVEL_AXIS
INCREMENT = Path(__file__).with_name('add_rows.h').read_text(encoding='utf-8')
_COMPLEX = """
#ifndef MGPU_COMPLEX
#define MGPU_COMPLEX
struct mgpu_complex64 { npy_float32 real, imag; };
struct mgpu_complex128 { npy_float64 real, imag; };
#endif
"""


# Names of NumPy -> other names of the same, which NumPy 1 has.
SAME = {'prod': 'product', 'cumprod': 'cumproduct', 'all': 'alltrue', 'any': 'sometrue', 'round': 'round_',
        'asmatrix': 'mat', 'inf': 'Inf Infinity PINF infty', 'nan': 'NaN NAN', 'float64': 'float_', 'bool_': 'bool8',
        'complex128': 'complex_ cfloat', 'longdouble': 'longfloat', 'clongdouble': 'clongfloat', 'intp': 'int0',
        'uintp': 'uint0', 'object_': 'object0', 'str_': 'str0 unicode_', 'bytes_': 'bytes0 string_', 'void': 'void0'}


def is_needed() -> bool:
    """Return whether NumPy is 2 or later."""
    import numpy
    return int(numpy.__version__.split('.')[0]) >= 2


class Casts:
    """The functions of ``np.cast``: ``np.cast[dtype](x)`` is an array of that type."""

    def __getitem__(self, dtype: Any) -> Any:
        import numpy
        dtype = numpy.dtype(getattr(dtype, 'dtype', dtype))  # Theano gives its own types, whose dtype is a str
        return lambda x: numpy.asarray(x).astype(dtype)


def restore_names() -> None:
    """Restore the names of NumPy 1 that Theano and Keras use, where NumPy 2 lacks them."""
    import numpy.core
    import numpy.linalg
    names = {**{old: getattr(numpy, new) for new, each in SAME.items() for old in each.split()},
             **vars(vars(numpy)['exceptions']), 'cast': Casts(), 'NINF': -numpy.inf, 'PZERO': 0.0, 'NZERO': -0.0,
             'sctype2char': lambda dtype: numpy.dtype(dtype).char, 'obj2sctype': lambda dtype: numpy.dtype(dtype).type,
             'asfarray': lambda a, dtype='d': numpy.asarray(a, dtype if numpy.dtype(dtype).kind in 'fc' else 'd'),
             'msort': lambda a: numpy.sort(a, axis=0), 'MAXDIMS': 64}
    vars(numpy).update({name: value for name, value in names.items() if name not in vars(numpy)})
    # These have moved, and each use of the old place warns.
    vars(numpy.core)['_multiarray_umath'] = vars(numpy)['_core']._multiarray_umath
    vars(numpy.linalg)['linalg'] = vars(numpy.linalg)['_linalg']


def compile_for_its_interface(cmodule: ModuleType) -> None:
    """Compile C code for the interface of NumPy 2, with the names that its headers lack.

    `cmodule` is ``theano.gof.cmodule``.
    """
    @wrap(cmodule.GCC_compiler)
    def compile_args(original, march_flags=True):
        return original(march_flags) + OPTIONS


def include_no_removed_header(conv: ModuleType) -> None:
    """Leave out a header that NumPy 2 lacks, and that the C code of `ConvOp` includes in vain.

    `conv` is ``theano.tensor.nnet.conv``.
    """
    conv.ConvOp.c_headers = lambda self: ['<numpy/arrayobject.h>', '<iostream>', '<sstream>']


def give_complex_numbers_fields() -> None:
    """Derive Theano's complex numbers in C from structs with the fields ``real`` and ``imag``, which NumPy 2's lack."""
    from theano.scalar.basic import Scalar

    @wrap(Scalar)
    def c_support_code(original, self):
        code = original(self)
        replaced = code.replace('public npy_complex', 'public mgpu_complex')
        return _COMPLEX + replaced if replaced != code else code


def add_rows_without_map_iterators() -> None:
    """Replace the C code of `AdvancedIncSubtensor1`, whose functions of NumPy's C interface NumPy 2 lacks."""
    from theano.tensor.subtensor import AdvancedIncSubtensor1
    AdvancedIncSubtensor1.c_support_code = lambda self: INCREMENT
    AdvancedIncSubtensor1.c_code_cache_version = lambda self: (8, 'rows', 1)


def name_all_axes() -> None:
    """Name all axes of an array in C code as NumPy 2 does: its functions take ``NPY_MAXDIMS`` for an axis."""
    from theano.tensor.basic import Argmax, MaxAndArgmax
    from theano.tensor.extra_ops import CumOp
    from theano.tensor.subtensor import AdvancedSubtensor1
    for op in (Argmax, MaxAndArgmax, CumOp, AdvancedSubtensor1):
        @wrap(op)
        def c_code(original, self, *args):
            return original(self, *args).replace('NPY_MAXDIMS', 'NPY_RAVEL_AXIS')
    CumOp.c_axis = property(lambda self: ALL_AXES if self.axis is None else self.axis)


def wrap_integers() -> None:
    """Wrap Python's integers that a smaller type cannot hold, as NumPy 1 did: modulo 256 and so on."""
    import numpy
    import theano
    from theano.misc import safe_asarray
    from theano.scalar.basic import AND, Cast
    from theano.tensor.elemwise import Elemwise

    @wrap(safe_asarray)
    def _asarray(original, a, dtype, order=None):
        try:
            return original(a, dtype, order)
        except OverflowError:
            return original(numpy.asarray(a, 'int64'), dtype, order)
    theano._asarray = _asarray

    @wrap(Cast)
    def impl(original, self, x):
        try:
            return original(self, x)
        except OverflowError:
            return _asarray(x, self.o_type.dtype)[()]

    AND.identity = numpy.int64(-1)  # fills an array of any type

    @wrap(Elemwise)
    def prepare_node(original, self, node, *args, **kwargs):
        original(self, node, *args, **kwargs)
        for owner in (self, node.tag):
            if isinstance(getattr(owner, 'ufunc', None), numpy.ufunc):
                owner.ufunc = _OfObjects(owner.ufunc)


class _OfObjects:
    """A ufunc made of a Python function, whose integers are NumPy's: another type of NumPy wraps them."""

    def __init__(self, ufunc):
        self.ufunc, self.nout = ufunc, ufunc.nout

    def __call__(self, *args):
        results = self.ufunc(*args)
        return tuple(map(_numpys, results)) if self.nout > 1 else _numpys(results)


def _numpys(result):
    """Return integers of a Python function as an array of NumPy's integers, and other results as they are."""
    import numpy
    array = numpy.asarray(result)
    if array.dtype == object:
        array = numpy.asarray(array.ravel().tolist()).reshape(array.shape)
    return array if array.dtype.kind in 'iu' else result


def compare_constants_exactly() -> None:
    """Find the type of a Python float by comparing it with its float32 in double precision."""
    import numpy
    from theano import config
    from theano.scalar.basic import NumpyAutocaster, Scalar

    @wrap(NumpyAutocaster)
    def __call__(original, self, x):
        is_found = config.cast_policy == 'custom' and not (config.floatX in self.dtypes and config.floatX != 'float64')
        # No type to choose from, so that Theano looks for one.
        return original(self, numpy.array(x, 'longdouble') if is_found and type(x) is float else x)

    @wrap(Scalar, 'filter')
    def filter_(original, self, data, strict=False, allow_downcast=None):
        if allow_downcast and type(data) is int and data.bit_length() < 64:
            data = _strong(data).astype(self.dtype)
        elif not allow_downcast and not (allow_downcast is None and self.dtype == config.floatX):
            data = _strong(data)
        return original(self, data, strict, allow_downcast)


def compute_in_the_type_of_numbers() -> None:
    """Compute with Python's numbers as with NumPy's int64 and float64 where Theano interprets scalar ops."""
    from theano.scalar.basic import Composite, Inv
    for op in (Inv, Composite):
        @wrap(op)
        def impl(original, self, *numbers):
            return original(self, *map(_strong, numbers))


def _strong(number):
    """Return a number of Python as one of NumPy, whose type counts in promotion; others as they are."""
    import numpy
    return numpy.asarray(number)[()] if type(number) in (int, float, complex) else number


def combine_numbers_with_arrays() -> None:
    """Compute with an array and a number, an array without dimensions, in the type of the array."""
    import theano
    from theano.tensor import subtensor
    from theano.tensor.nnet import bn

    _convert_inputs([subtensor.AdvancedIncSubtensor1, subtensor.BaseAdvancedIncSubtensor],
                    lambda x, y, *places: [x, y if y.ndim else theano._asarray(y, x.dtype), *places])
    _convert_inputs([bn.AbstractBatchNormTrain, bn.AbstractBatchNormInference, bn.AbstractBatchNormTrainGrad],
                    lambda *inputs: [each if each.ndim else each.item() for each in inputs])


def _convert_inputs(ops, convert):
    """Have ops compute in Python with converted inputs."""
    for op in ops:
        @wrap(op)
        def perform(original, self, node, inputs, *args):
            original(self, node, convert(*inputs), *args)


def _with_last_in_64_bits(*inputs):
    *arrays, numbers = inputs
    return [*arrays, numbers.astype('int64') if numbers.dtype.kind in 'iu' else numbers]


def count_in_64_bits() -> None:
    """Compute places in arrays, and limits of draws, in 64 bits, where small integers are given."""
    from theano.tensor import basic, extra_ops, raw_random
    _convert_inputs([basic.Split, extra_ops.FillDiagonalOffset], _with_last_in_64_bits)

    @wrap(raw_random)
    def random_integers_helper(original, random_state, low, high, size):
        return original(random_state, low.astype('int64'), high.astype('int64'), size)


def add_up_gradients_of_softmax() -> None:
    """Add up the gradient of a softmax in double precision in Python."""
    import numpy
    from theano.tensor.nnet import nnet
    vars(nnet)['sum'] = lambda values: values.dtype.type(sum(values, numpy.float64(0)))


def copy_random_states() -> None:
    """Copy the state of random numbers whole before a draw that must not change it."""
    from theano.tensor import raw_random
    vars(raw_random)['copy'] = copy.deepcopy


def draw_in_64_bits(module: ModuleType) -> None:
    """Compute the random numbers of `MRG_RandomStreams` as integers of 64 bits, as NumPy 1 did.

    `module` is ``theano.sandbox.rng_mrg`` or ``theano.sandbox.multinomial``.
    """
    import numpy
    names = {'mrg_uniform', 'MultinomialFromUniform', 'ChoiceFromUniform'}.intersection(vars(module))
    _convert_inputs([vars(module)[name] for name in names], _with_last_in_64_bits)  # of samples, or a size
    if hasattr(module, 'mrg_next_value'):
        @wrap(module)
        def mrg_next_value(original, rstate, new_rstate, NORM, mask, offset):
            return original(rstate, new_rstate, NORM, numpy.int64(mask), numpy.int64(offset))


def transform_in_double_precision(module: ModuleType) -> None:
    """Compute Fourier transforms of single precision in double precision.

    `module` is ``theano.tensor.fft`` or ``theano.tensor.fourier``.
    """
    for name in {'RFFTOp', 'IRFFTOp', 'Fourier'}.intersection(vars(module)):
        @wrap(vars(module)[name])
        def perform(original, self, node, inputs, output_storage):
            kind = 'complex128' if inputs[0].dtype.kind == 'c' else 'float64'
            original(self, node, [inputs[0].astype(kind), *inputs[1:]], output_storage)
            output_storage[0][0] = output_storage[0][0].astype(node.outputs[0].dtype)


def flatten_places_of_unique_elements() -> None:
    """Give the places of unique elements as a vector, as `Unique` promises."""
    from theano.tensor.extra_ops import Unique

    @wrap(Unique)
    def perform(original, self, node, inputs, output_storage):
        original(self, node, inputs, output_storage)
        for storage in output_storage[1:]:
            storage[0] = storage[0].ravel()


def give_back_destroyed_numbers(debugmode: ModuleType) -> None:
    """Give back an input without dimensions that was destroyed as an array of its own, not by ``itemset``.

    `debugmode` is ``theano.compile.debugmode``, which calls ``itemset`` of plain arrays alone.
    """
    import numpy
    subclass = type('DestroyedNumber', (numpy.ndarray,), {})

    @wrap(debugmode)
    def _check_inputs(original, node, storage_map, r_vals, dr_vals, *args, **kwargs):
        result = original(node, storage_map, r_vals, dr_vals, *args, **kwargs)
        dr_vals.update({variable: (value.view(subclass), destroyer) for variable, (value, destroyer) in dr_vals.items()
                        if type(value) is numpy.ndarray and not value.ndim})
        return result


def average_in_double_precision(callbacks: ModuleType) -> None:
    """Add up the losses and metrics of an epoch in double precision.

    `callbacks` is ``keras.callbacks.callbacks``.
    """
    import numpy

    @wrap(callbacks.BaseLogger)
    def on_batch_end(original, self, batch, logs=None):
        wide = {name: numpy.float64(value) for name, value in (logs or {}).items()
                if name not in self.stateful_metrics and getattr(value, 'dtype', None) in ('float16', 'float32')}
        original(self, batch, {**(logs or {}), **wide})
