"""Loops of Theano's ops on the host: faster, and the same results bit by bit."""
import platform
import re
import subprocess

from theano_mgpu.compat.theano_loops import LOOPING, POOLING

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof import CLinker, FunctionGraph
from theano.gof.cmodule import std_include_dirs
from theano.tensor.elemwise import CAReduce, Elemwise
from theano.tensor.signal.pool import MaxPoolGrad, Pool

pytestmark = pytest.mark.needs_compiler
x86_64 = pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='it reads instructions of x86-64')
f32 = np.float32
BRANCH_ON_EQUAL_VALUES = re.compile(r'ucomiss.*\n\s*(jp|jne|je)\b')


def adam():
    """Return inputs and new values of Keras's Adam."""
    p, m, v, g = T.fvectors('pmvg')
    new_m, new_v = f32(.9) * m + f32(.1) * g, f32(.999) * v + f32(.001) * T.sqr(g)
    new_p = p - f32(.01) * new_m / (T.sqrt(T.clip(new_v, f32(0), f32(np.inf))) + f32(1e-7))
    return [p, m, v, g], [new_p, new_m, new_v]


def compiled(options):
    with theano.configparser.change_flags(**{'gcc.cxxflags': options}):
        inputs, outputs = adam()
        borrowed = [theano.In(variable, mutable=True, borrow=True) for variable in inputs]
        return theano.function(borrowed, outputs, mode=theano.Mode('cvm', 'fast_run'))


def assembly(node, path):
    """Return the assembly that g++ makes of an op, for any x86-64."""
    linker = CLinker().accept(FunctionGraph(node.inputs, node.outputs, clone=True))
    source = path / 'op.cpp'
    source.write_text(str(linker.get_dynamic_module().code()))
    arguments = [each for each in linker.compile_args() if not each.startswith('-m')]
    arguments += ['-I' + folder for folder in [*std_include_dirs(), *linker.header_dirs()]]
    subprocess.run([theano.config.cxx, *arguments, '-O3', '-march=x86-64', '-fPIC', '-w', '-S', source,
                    '-o', path / 'op.s'], check=True)
    return (path / 'op.s').read_text()


def use_theanos_own(monkeypatch, op, names):
    for name in names:
        monkeypatch.setattr(op, name, getattr(op, name).__wrapped__)


@x86_64
def test_a_loop_is_vectorised(tmp_path, monkeypatch):
    nodes = compiled('').maker.fgraph.apply_nodes
    node, = [node for node in nodes if 'sqrt' in str(node.op)]
    assert 'sqrtps' in assembly(node, tmp_path)
    use_theanos_own(monkeypatch, Elemwise, LOOPING)
    assert 'sqrtps' not in assembly(node, tmp_path)


def test_results_stay_the_same_bit_by_bit(monkeypatch):
    vectorised = compiled('-march=native')
    use_theanos_own(monkeypatch, Elemwise, LOOPING)
    plain = compiled('-march=native')
    for n in (0, 1, 7, 16, 1003):
        given = np.random.RandomState(n).randn(4, n).astype('float32')
        given[2] = abs(given[2])
        strided = np.repeat(given, 2, axis=1)[:, ::2]
        expected = plain(*given.copy())
        for values in (given.copy(), strided):  # an output may take the memory of an input
            for found, each in zip(vectorised(*values), expected):
                np.testing.assert_array_equal(found, each)


def max_pooling_gradient(ndim, window, options=''):
    """Return the gradient of max pooling as a function of values, maxima and gradients, and its node."""
    with theano.configparser.change_flags(**{'gcc.cxxflags': options}):
        given = [T.TensorType('float32', [False] * (ndim + 2))() for _ in range(3)]
        function = theano.function(given, MaxPoolGrad(ignore_border=True, ndim=ndim)(*given, *window))
    node, = [node for node in function.maker.fgraph.apply_nodes if isinstance(node.op, MaxPoolGrad)]
    return function, node


@x86_64
def test_max_pooling_has_no_branch_on_the_maximum(tmp_path, monkeypatch):
    _, node = max_pooling_gradient(2, [(2, 2)])
    assert not BRANCH_ON_EQUAL_VALUES.search(assembly(node, tmp_path))
    use_theanos_own(monkeypatch, MaxPoolGrad, POOLING)
    assert BRANCH_ON_EQUAL_VALUES.search(assembly(node, tmp_path))


@pytest.mark.parametrize('ndim, window', [
    (1, [(3,), (3,), (0,)]),
    pytest.param(2, [(2, 2), (2, 2), (0, 0)], marks=pytest.mark.slow),
    (2, [(3, 2), (1, 1), (1, 0)]),  # windows overlap, and lie over the border
    (3, [(2, 2, 2), (2, 1, 2), (0, 1, 0)]),
])
def test_gradients_of_max_pooling_stay_the_same_bit_by_bit(ndim, window, monkeypatch):
    random = np.random.RandomState(0)
    values = random.randint(-1, 3, (2, 3, 7, 6, 5)[:ndim + 2]).astype('float32')  # many windows have several maxima
    values.flat[:5] = -0., np.nan, np.inf, -np.inf, 0.
    pool = Pool(ignore_border=True, mode='max', ndim=ndim)(values, *window)
    maxima = theano.function([], pool, mode='FAST_COMPILE')()
    gradients = random.randn(*maxima.shape).astype('float32')
    gradients.flat[:5] = -0., np.nan, np.inf, -np.inf, 0.
    ours, _ = max_pooling_gradient(ndim, window)
    use_theanos_own(monkeypatch, MaxPoolGrad, POOLING)
    theanos, _ = max_pooling_gradient(ndim, window)
    found, expected = (function(values, maxima, gradients) for function in (ours, theanos))
    np.testing.assert_array_equal(found.view('int32'), expected.view('int32'))
    assert (found != 0).any()


def sum_of(axis, dtype, acc_dtype, options=''):
    """Return a function that sums over axes of a 3-d array, and its node."""
    with theano.configparser.change_flags(**{'gcc.cxxflags': options}):
        x = T.TensorType(dtype, [False] * 3)()
        function = theano.function([x], T.sum(x, axis=axis, dtype=dtype, acc_dtype=acc_dtype))
    node, = [node for node in function.maker.fgraph.apply_nodes if isinstance(node.op, CAReduce)]
    return function, node


@x86_64
def test_sums_of_rows_are_vectorised(tmp_path, monkeypatch):
    _, node = sum_of((0, 1), 'float32', 'float64')
    assert 'addpd' in assembly(node, tmp_path)
    use_theanos_own(monkeypatch, CAReduce, LOOPING)
    assert 'addpd' not in assembly(node, tmp_path)


@pytest.mark.parametrize('dtype, acc_dtype', [('float32', 'float64'), ('float32', 'float32'), ('float64', 'float64'),
                                              ('int8', 'int64')])
@pytest.mark.parametrize('axis', [0, (0, 1), (0, 2), 2, None])
def test_sums_stay_the_same_bit_by_bit(axis, dtype, acc_dtype, monkeypatch):
    ours, _ = sum_of(axis, dtype, acc_dtype, '-march=native')
    use_theanos_own(monkeypatch, CAReduce, LOOPING)
    theanos, _ = sum_of(axis, dtype, acc_dtype, '-march=native')
    for shape in [(5, 7, 19), (0, 7, 19), (5, 0, 3), (5, 7, 0), (1, 1, 1)]:
        given = (100 * np.random.RandomState(0).randn(*shape)).astype(dtype)
        if dtype.startswith('float') and given.size > 9:
            given.flat[:9:2] = -0., np.nan, np.inf, -np.inf, 1e30
        fortran, strided = np.asfortranarray(given), np.repeat(given, 2, axis=2)[:, :, ::2]
        for values in (given, fortran, strided):
            np.testing.assert_array_equal(ours(values), theanos(values))
