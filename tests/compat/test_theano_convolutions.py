"""Convolutions on the host: their columns have the same bits as the columns of Theano's own code."""
import ctypes
import subprocess

from theano_mgpu.compat.theano_loops import COLUMNS

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiled_ops import use_theanos_own
from theano.gof import CLinker, FunctionGraph
from theano.tensor.nnet.corr import BaseCorrMM, CorrMM, CorrMM_gradInputs, CorrMM_gradWeights

pytestmark = pytest.mark.needs_compiler
GUARD = -7.5  # after the end of a result
CODE = """
#include <stdint.h>
typedef intptr_t npy_intp;
typedef float npy_float;
typedef double npy_double;
%s
#define GEOMETRY g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[10], g[11], g[12]
extern "C" void im2col_of(const %s* from, const int* g, %s* to) { im2col(from, GEOMETRY, to); }
extern "C" void col2im_of(const %s* from, const int* g, %s* to) { col2im(from, GEOMETRY, to); }
"""


def node_of(dtype):
    return CorrMM()(*(T.TensorType(dtype, [False] * 4)() for _ in range(2))).owner


def columns_code(dtype):
    """Return the C code of a convolution up to Theano's own function."""
    node = node_of(dtype)
    return node.op.c_support_code_apply(node, 'name').split('// Theano op code')[0]


def compiled(dtype, path):
    """Return the library that has im2col and col2im, for a convolution of a dtype."""
    kind = {'float32': 'float', 'float64': 'double'}[dtype]
    path.with_suffix('.cpp').write_text(CODE % (columns_code(dtype), *[kind] * 4))
    subprocess.run([*theano.config.cxx.split(), '-O1', '-march=native', '-shared', '-fPIC', '-w',
                    path.with_suffix('.cpp'), '-o', path], check=True)
    return ctypes.CDLL(str(path))


def geometries(n):
    """Yield n geometries, as the arguments of im2col, with the number of rows and columns of the output."""
    random = np.random.RandomState(0)
    while n:
        channels, kernel_h, kernel_w, dilation_h, dilation_w, stride_h, stride_w = random.randint(1, 5, 7)
        height, width = random.randint(1, 40, 2)
        pads = random.randint(0, 5, 4)
        rows = (height + pads[0] + pads[1] - (kernel_h - 1) * dilation_h - 1) // stride_h + 1
        columns = (width + pads[2] + pads[3] - (kernel_w - 1) * dilation_w - 1) // stride_w + 1
        if rows > 0 and columns > 0:
            n -= 1
            yield (channels, height, width, kernel_h, kernel_w, dilation_h, dilation_w, *pads, stride_h, stride_w), \
                channels * kernel_h * kernel_w * rows * columns


def moved(function, values, geometry, size, before):
    """Return the result of im2col or col2im, with a guard after its end."""
    result = np.append(np.full(size, before, values.dtype), np.full(9, GUARD, values.dtype))
    function(values.ctypes.data_as(ctypes.c_void_p), (ctypes.c_int * 13)(*geometry),
             result.ctypes.data_as(ctypes.c_void_p))
    return result


def code_of(node):
    return str(CLinker().accept(FunctionGraph(node.inputs, node.outputs, clone=True)).get_dynamic_module().code())


def test_convolutions_move_rows(monkeypatch):
    assert 'mgpu_columns::move_channels' in code_of(node_of('float32'))
    version = CorrMM().c_code_cache_version()
    use_theanos_own(monkeypatch, BaseCorrMM, COLUMNS)
    assert 'mgpu_columns' not in code_of(node_of('float32')) and CorrMM().c_code_cache_version() != version


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_columns_are_the_same_bit_by_bit(dtype, tmp_path, monkeypatch):
    ours = compiled(dtype, tmp_path / 'ours.so')
    use_theanos_own(monkeypatch, BaseCorrMM, COLUMNS)
    theirs = compiled(dtype, tmp_path / 'theirs.so')
    for geometry, size in geometries(400):
        channels, height, width = geometry[:3]
        image, columns = (np.random.RandomState(n).randn(n).astype(dtype) for n in (channels * height * width, size))
        for values in (image, columns):
            values[::7] = np.resize(np.array([-0., np.nan, np.inf, -np.inf], dtype), len(values[::7]))
        for name, values, n, before in (('im2col_of', image, size, 3), ('col2im_of', columns, len(image), 0)):
            found, expected = (moved(getattr(library, name), values, geometry, n, before)
                               for library in (ours, theirs))
            for result in (found, expected):
                result[np.isnan(result)] = np.nan  # the compiler chooses the sign of a sum of two
            assert found.tobytes() == expected.tobytes(), (name, geometry)
            assert (found[n:] == GUARD).all()


@pytest.mark.slow  # it compiles the ops of both
@pytest.mark.parametrize('border, stride, groups', [
    ('half', (2, 2), 1), ('valid', (1, 1), 2), (((1, 0), (2, 3)), (3, 2), 1)])
def test_convolutions_and_gradients_are_the_same_bit_by_bit(border, stride, groups, monkeypatch):
    random = np.random.RandomState(0)
    images, filters = random.randn(5, 4, 13, 10).astype('float32'), random.randn(6, 4 // groups, 3, 3).astype('float32')
    options = dict(border_mode=border, subsample=stride, num_groups=groups)

    def results():
        x, w, g = T.ftensor4(), T.ftensor4(), T.ftensor4()
        forward = theano.function([x, w], CorrMM(**options)(x, w))(images, filters)
        gradients = theano.function([x, w, g], [CorrMM_gradWeights(**options)(x, g, T.as_tensor([3, 3])),
                                                CorrMM_gradInputs(**options)(w, g, T.as_tensor([13, 10]))])
        return [forward, *gradients(images, filters, np.cos(forward))]
    ours = results()
    use_theanos_own(monkeypatch, BaseCorrMM, COLUMNS)
    for found, expected in zip(ours, results()):
        np.testing.assert_array_equal(found, expected)
