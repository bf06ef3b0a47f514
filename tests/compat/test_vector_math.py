"""Functions of libmvec in Theano's loops on the host: the same bits for an element wherever it lies."""
import ctypes

from theano_mgpu.compat import vector_math

import numpy as np
import pytest
import theano
import theano.tensor as T
from scipy import special
from support.compiled_ops import assembly, one_module, x86_64
from support.parameters import slow_but
from theano.gof import CLinker, FunctionGraph

pytestmark = [pytest.mark.needs_compiler,
              pytest.mark.skipif(not vector_math.available(), reason='libmvec is not installed')]
change_flags = theano.configparser.change_flags
POWER = 2.7
FUNCTIONS = {'exp': T.exp, 'expm1': T.expm1, 'log': T.log, 'log1p': T.log1p, 'tanh': T.tanh, 'erf': T.erf,
             'pow': lambda x: x ** T.constant(POWER, dtype=x.dtype), 'sigmoid': T.nnet.sigmoid,
             'softplus': T.nnet.softplus}
EXACT = {'exp': np.exp, 'expm1': np.expm1, 'log': np.log, 'log1p': np.log1p, 'tanh': np.tanh, 'erf': special.erf,
         'pow': lambda x: x ** float(np.float32(POWER)), 'sigmoid': special.expit,
         'softplus': lambda x: np.logaddexp(0, x)}
SPECIAL = [np.nan, np.inf, -np.inf, 0., -0., 1., -1., 1e-40, -1e-40, 1.2e-38, -1.2e-38, 88.8, -88.8, 104., -104., 3e38,
           -3e38]
quick_in_single_precision = pytest.mark.parametrize('dtype', slow_but(['float32'], ['float32', 'float64']))


def values_of(dtype, n=57):
    """Return ordinary values, with special ones among them."""
    values = np.random.RandomState(0).randn(n).astype(dtype) * 9
    values[::3] = np.resize(np.array(SPECIAL, dtype), len(values[::3]))
    return values


def bits(array):
    """Return the bits of an array of floats as integers; every NaN has the same ones."""
    array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.view('int%d' % (8 * array.itemsize))


def node_of(function, dtype='float32'):
    return function(T.TensorType(dtype, [False])()).owner


@pytest.mark.slow
@x86_64
@pytest.mark.parametrize('march, called', [
    ('x86-64', '_ZGVbN4v_%s'), ('haswell', '_ZGVdN8v_%s')])
def test_loops_call_vector_functions(tmp_path, march, called):
    for name in ('tanh', 'sigmoid'):
        symbol = 'tanhf' if name == 'tanh' else 'expf'
        text = assembly(node_of(FUNCTIONS[name]), tmp_path, march)
        assert called % ('mgpu_' + symbol) + '@PLT' in text and called % symbol + '@PLT' in text
        assert '\t' + symbol not in text  # of libm
        with change_flags(**{'mgpu.vector_math': 'off'}):
            assert '_ZGV' not in assembly(node_of(FUNCTIONS[name]), tmp_path, march)


@pytest.mark.slow
@x86_64
def test_strided_loops_and_branches_are_vectorised(tmp_path):
    x, row = T.fmatrix(), T.frow()
    for inputs, output, loops in [([x, row], T.exp(x + row), 1),  # over strided memory alone
                                  ([x], T.switch(x > 0, x, T.expm1(x) * 3), 2)]:
        node, = theano.function(inputs, output, mode=theano.Mode('py', 'fast_run')).maker.fgraph.apply_nodes
        assert assembly(node, tmp_path, 'haswell').count('call\t_ZGVdN8v_mgpu_exp') >= loops


@pytest.mark.slow
@quick_in_single_precision
def test_an_element_has_the_same_bits_anywhere(dtype):
    number, vector, matrix = [T.TensorType(dtype, [False] * ndim)() for ndim in range(3)]
    of_vector, of_matrix = [one_module([x], [f(x) for f in FUNCTIONS.values()]) for x in (vector, matrix)]
    of_number = theano.function([number], [f(number) for f in FUNCTIONS.values()], mode=theano.Mode('c', None))
    values = values_of(dtype)
    alone = [np.array(each) for each in zip(*map(of_number, values))]

    def check(function, take):
        for name, found, expected in zip(FUNCTIONS, function(take(values)), alone):
            np.testing.assert_array_equal(bits(found), bits(take(expected)), err_msg=name)

    for n in range(1, 41):
        check(of_vector, lambda each, n=n: each[:n])
    for offset in range(1, 17):
        check(of_vector, lambda each, offset=offset: each[offset:])
    for step in (2, 3, -1):
        check(of_vector, lambda each, step=step: each[::step])
    for cut in (np.s_[:, 1:], np.s_[:, ::2], np.s_[1:2, 3:], np.s_[::2, :5]):
        check(of_matrix, lambda each, cut=cut: each.reshape(3, 19)[cut])
    check(of_matrix, lambda each: each.reshape(3, 19).T)


@pytest.mark.slow
@quick_in_single_precision
def test_fused_loops_and_scan_have_the_same_bits(dtype):
    x, columns = T.TensorType(dtype, [False] * 2)(), T.TensorType(dtype, [False])()
    values, one = values_of(dtype).reshape(3, 19), np.ones(19, dtype)
    of_one = theano.function([x], [f(x) for f in FUNCTIONS.values()], mode=theano.Mode('c', None))(values)
    fused = theano.function([x, columns], [f(x) * columns for f in FUNCTIONS.values()])
    scanned = theano.function([x, columns], theano.scan(
        lambda row: [f(row) * columns for f in FUNCTIONS.values()], sequences=x)[0])
    for function in (fused, scanned):
        assert 'Composite' in str(function.maker.fgraph) or function is scanned
        for name, found, expected in zip(FUNCTIONS, function(values, one), of_one):
            np.testing.assert_array_equal(bits(found), bits(expected), err_msg=name)


@pytest.mark.slow
def test_sums_of_products_have_the_same_bits_anywhere():
    """A product is rounded before it is added, in vectors and in the last elements."""
    x, y = T.fmatrices('xy')
    sigmoid, random = T.nnet.sigmoid, np.random.RandomState(0)
    cell = one_module([x, y], sigmoid(x) * y + sigmoid(y) * T.tanh(x), 'fast_run')
    given = random.randn(2, 16, 64).astype('float32')
    expected = cell(*given)
    for n in range(1, 18):
        for cut in (np.s_[:, :n], np.s_[:, 3:3 + n], np.s_[::2, :n]):
            for layout in (np.asarray, np.ascontiguousarray):
                np.testing.assert_array_equal(cell(*(layout(each[cut]) for each in given)), expected[cut])


@pytest.mark.slow
@quick_in_single_precision
def test_special_values_are_those_of_libm(dtype):
    x = T.TensorType(dtype, [False])()
    values = np.array(SPECIAL * 2, dtype)
    ours = one_module([x], [f(x) for f in FUNCTIONS.values()])(values)
    with change_flags(**{'mgpu.vector_math': 'off'}):
        theanos = one_module([x], [f(x) for f in FUNCTIONS.values()])(values)
    for name, found, expected in zip(FUNCTIONS, ours, theanos):
        has_branch = name == 'sigmoid' and (values < -80)  # Theano's own is 0 from there on
        special = ~np.isfinite(expected) | (expected == 0) & ~np.bool_(has_branch)
        np.testing.assert_array_equal(bits(found)[special], bits(expected)[special], err_msg=name)
        assert np.isfinite(found[~special]).all(), name


def test_errors_are_at_most_four_units():
    x = T.fvector()
    random = np.random.RandomState(1)
    values = np.concatenate([random.randn(20000) * 20, random.randint(0, 1 << 32, 20000, 'uint32').view('f')])
    values = values[np.isfinite(values)].astype('float32')
    for name, found in zip(FUNCTIONS, one_module([x], [f(x) for f in FUNCTIONS.values()])(values)):
        with np.errstate(all='ignore'):
            exact = EXACT[name](values.astype('float64'))
        ordinary = np.isfinite(exact) & (abs(exact) < np.finfo('f').max)
        units = abs(found[ordinary] - exact[ordinary]) / np.spacing(abs(exact[ordinary]).astype('f')).astype('d')
        assert units.max() <= 4, name


@pytest.mark.slow
def test_off_means_libm():
    libm = ctypes.CDLL('libm.so.6')
    libm.tanhf.restype, libm.tanhf.argtypes = ctypes.c_float, [ctypes.c_float]
    values = np.linspace(-3, 3, 999, dtype='float32')
    expected = np.array([libm.tanhf(each) for each in values], 'float32')
    x = T.fvector()
    with change_flags(**{'mgpu.vector_math': 'off'}):
        np.testing.assert_array_equal(one_module([x], T.tanh(x))(values), expected)
    assert (one_module([x], T.tanh(x))(values) != expected).any()


def key_of(node):
    return CLinker().accept(FunctionGraph(node.inputs, node.outputs, clone=True)).cmodule_key()


def test_code_with_and_without_is_not_mixed_in_the_cache(monkeypatch):
    x = T.fvector()
    fused, = theano.function([x], T.tanh(x) + 1).maker.fgraph.apply_nodes
    others = node_of(T.sqr), node_of(lambda x: x + x)
    for node in (node_of(T.tanh), fused):
        key = key_of(node)
        with change_flags(**{'mgpu.vector_math': 'off'}):
            assert key_of(node) != key
        assert key_of(node) == key
    for node in others:
        key = key_of(node)
        with change_flags(**{'mgpu.vector_math': 'off'}):
            assert key_of(node) == key


def test_without_the_library_the_code_is_theanos(monkeypatch):
    def missing(*_):
        raise OSError('libmvec.so.1: cannot open shared object file')
    with change_flags(**{'mgpu.vector_math': 'off'}):
        theanos = key_of(node_of(T.tanh))
    monkeypatch.setattr(ctypes, 'CDLL', missing)
    vector_math._loaded.cache_clear()
    try:
        assert vector_math.available() == [] and key_of(node_of(T.tanh)) == theanos
    finally:
        vector_math._loaded.cache_clear()


def test_other_compilers_call_libm(monkeypatch):
    assert vector_math.available()
    for cxx, version in [('clang++', '14.0.6'), ('g++', '7.5.0'), ('', '')]:
        monkeypatch.setattr(theano.gof.cmodule, 'gcc_version_str', version)
        with change_flags(cxx=cxx):
            assert vector_math.available() == []


@pytest.mark.slow
def test_an_older_library_has_fewer_functions(monkeypatch, tmp_path):
    class Library:
        """The library of glibc 2.31."""

        def __init__(self, *_):
            for name in ('exp', 'log'):
                setattr(self, '_ZGVbN4v_%sf' % name, None)
                setattr(self, '_ZGVbN2v_' + name, None)
            self._ZGVbN4vv_powf = self._ZGVbN2vv_pow = None
    monkeypatch.setattr(ctypes, 'CDLL', Library)
    vector_math._loaded.cache_clear()
    try:
        assert vector_math.available() == ['exp', 'log', 'pow', 'sigmoid']
        assert '_ZGV' not in assembly(node_of(T.tanh), tmp_path)
        assembly(node_of(T.nnet.softplus), tmp_path)
    finally:
        vector_math._loaded.cache_clear()


@pytest.mark.slow
def test_powers_of_integers_are_exact():
    x, y, z = T.ivector(), T.ivector(), T.fvector()
    base, exponent = np.arange(1, 10, dtype='int32'), np.arange(9, 0, -1, dtype='int32')
    whole, mixed = one_module([x, y, z], [x ** y, z ** y])(base, exponent, base.astype('float32'))
    np.testing.assert_array_equal(whole, base ** exponent)
    np.testing.assert_array_equal(mixed, base ** exponent)
