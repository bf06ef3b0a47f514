"""Theano and Keras on NumPy 2: the types and values that NumPy 1 gives them, and C code for either one."""
import warnings

from theano_mgpu.compat import numpy2

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.patches import WITHOUT_PATCH
from support.processes import python
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.subtensor import AdvancedIncSubtensor1

on_numpy_2 = pytest.mark.skipif(not numpy2.is_needed(), reason='NumPy 1 needs no patch')
change_flags = theano.configparser.change_flags
IMPORT = ('import numpy as np, theano_mgpu, theano, theano.tensor as T\n'
          'from theano.tensor import extra_ops, fourier\n')
C_CODE = 'x, i = T.%s(), T.lvector(); print(theano.function([x, i], %s, mode=theano.Mode("c", None))([1, 2], [0, 0]))'
PYTHON = 'x = T.%s(); print(theano.function([x], %s, mode=theano.Mode("py", None))([[1, 2], [1, 3]])%s)'
EXAMPLES = [  # fix, code that needs it, its output, and the symptom
    ('restore_names', 'print(theano.scalar.mul.impl(2, 3))', '6', "no attribute 'product'"),
    ('compile_for_its_interface', 'print(bool(theano.gof.vm.CVM))', 'True', 'PyInt_FromLong'),
    ('give_complex_numbers_fields', C_CODE % ('zvector', 'x * x'), '[1.+0.j 4.+0.j]', 'has no member named'),
    ('add_rows_without_map_iterators', C_CODE % ('dvector', 'T.inc_subtensor(x[i], 3)'), '[7. 2.]',
     'PyArrayMapIterObject'),
    ('include_no_removed_header', 'x = T.tensor4(); mode = theano.Mode("c", None)\n'
     'print(theano.function([x], T.nnet.conv.conv2d(x, x), mode=mode)(np.full((1, 1, 1, 1), 3.0)))', '[[[[9.]]]]',
     'numpy/noprefix.h'),
    ('name_all_axes', C_CODE % ('dvector', 'T.max_and_argmax(x)[1]'), '1', 'AxisError'),
    ('wrap_integers', 'print(theano.scalar.Cast(theano.scalar.uint8).impl(300))', '44', 'out of bounds for uint8'),
    ('compare_constants_exactly', 'print(T.constant(0.1).dtype)', 'float64', 'float32'),
    ('compute_in_the_type_of_numbers', PYTHON % ('dmatrix', 'T.inv(x)', '[1, 1] == 1 / 3'), 'True', 'False'),
    ('combine_numbers_with_arrays', 'v = T.ones((2,), "float32")\n' + PYTHON % (
        'fmatrix', 'T.nnet.bn.batch_normalization_train(x, v, v)[0]', '.dtype'), 'float32', 'float64'),
    ('copy_random_states', 's = T.shared_randomstreams.RandomStreams(5)\n'
     'f = theano.function([], s.uniform((2,)), no_default_updates=True, mode=theano.Mode("py", None))\n'
     'print(f().tolist() == f().tolist())', 'True', 'False'),
    ('count_in_64_bits', 'x = T.bmatrix(); f = theano.function([x], extra_ops.fill_diagonal_offset(x, 1, -2))\n'
     'print(f(np.zeros((100, 100), "int8")).diagonal(-2).sum())', '98', '0'),
    ('add_up_gradients_of_softmax', 'a = np.full((1, 3001), 1e-3, "f"); a[0, 0] = 3e5; x = T.fmatrix()\n'
     'f = theano.function([x], T.nnet.nnet.softmax_grad(T.ones_like(x), x), mode=theano.Mode("py", None))\n'
     'print(f(a)[0, 1] < -300.001)', 'True', 'False'),
    ('draw_in_64_bits', 'from theano.sandbox.rng_mrg import MRG_RandomStreams as Streams\n'
     'print(theano.function([], Streams(7).uniform((2,)), mode=theano.Mode("py", None))())', '[0.01345867 0.15446884]',
     'Python integer 4294967295 out of bounds for int32'),
    ('give_back_destroyed_numbers', 'n = theano.shared(3.0)\n'
     'f = theano.function([], updates=[(n, n + 1)], mode=theano.compile.DebugMode(check_c_code=False))\n'
     'f(), f(); print(n.get_value())', '5.0', '`itemset` was removed'),
    ('transform_in_double_precision', PYTHON % ('fmatrix', 'fourier.fft(x, 2, 1)', '.dtype'), 'complex128',
     'complex64'),
    ('flatten_places_of_unique_elements',
     PYTHON % ('fmatrix', 'extra_ops.Unique(return_inverse=True)(x)[1]', '.shape'), '(4,)', '(2, 2)'),
]


@on_numpy_2
@pytest.mark.parametrize('fix,code,output,symptom', EXAMPLES, ids=[fix for fix, *_ in EXAMPLES])
def test_without_a_fix_its_symptom_is_back(fix, code, output, symptom, tmp_path):
    for before in ('', WITHOUT_PATCH % fix):
        flags = 'floatX=float64,on_unused_input=ignore,base_compiledir=%s/%d' % (tmp_path, len(before))
        done = python('-c', before + IMPORT + code, flags=flags, expected=None)
        if not before:
            assert done.stdout.strip() == output, done.stderr
    assert symptom in done.stdout + done.stderr and done.stdout.strip() != output


@pytest.mark.parametrize('dtype,constant,expected', [
    ('uint8', 300, 'int16'), ('uint8', -1, 'int16'), ('int8', 200, 'int16'), ('int8', 2, 'int8'),
    ('uint8', 10, 'int16'), ('int8', 2 ** 40, 'int64'), ('int64', 2 ** 63, 'float64'), ('float16', 1, 'float16'),
    ('float32', 2.5, 'float32'), ('float32', .1, 'float64'), ('float32', 300, 'float32'),
    ('float32', np.float64(2.5), 'float64'), ('float64', .1, 'float64')])
def test_constants_have_the_type_of_numpy_1(dtype, constant, expected):
    with change_flags(floatX='float64', cast_policy='custom'):
        x = T.TensorType(dtype, [False])()
        assert ((x + constant).dtype, (x * constant).dtype) == (expected, expected)


def test_constants_are_exact():
    x = T.dvector()
    with change_flags(floatX='float64'):
        for value in (.1, 1e-8, 1e40, np.pi):
            for linker in ('py', 'c') if theano.config.cxx else ('py',):
                f = theano.function([x], x * value, mode=theano.Mode(linker, None))
                assert f([1.0])[0] == value
        with theano.scalar.autocast_float_as('float32'):
            assert T.constant(.1).dtype == 'float32'


def test_python_casts_and_inverts_as_numpy_1():
    mode = theano.Mode('py', None)
    x, y = T.lvector(), T.dvector()
    small, fused = theano.function([x], [T.cast(x, 'int8'), T.cast(x * x, 'uint8')], mode=mode)([300, -1])
    assert (small.tolist(), fused.tolist()) == ([44, -1], [144, 1])
    assert theano.function([y], T.inv(y), mode=mode)([3.0])[0] == 1 / 3
    assert theano.function([x], T.inv(x), mode=mode)([3])[0] == 1 / 3
    assert theano.scalar.int8.filter(300, allow_downcast=True) == 44
    for value, downcast in ((300, False), (2 ** 63, True)):
        with pytest.raises(TypeError):
            theano.scalar.int8.filter(value, allow_downcast=downcast)


def test_fused_ops_compute_in_python_as_numpy_1():
    x = T.lvector()
    f = theano.function([x], [x * 2 + 1, x * x * .5 + x], mode=theano.Mode('py', 'fast_run'))
    assert 'Composite' in str(f.maker.fgraph.toposort())
    for found, expected in zip(f([300, -7]), ([601, -13], [45300, 17.5])):
        np.testing.assert_array_equal(found, expected)


def test_numbers_are_added_to_elements_in_their_type():
    mode = theano.Mode('py', None)
    for dtype in ('uint64', 'int8', 'float32'):
        x, y = T.TensorType(dtype, [False])(), T.TensorType('int8', [])()
        at = [np.array([0, 1, 0]), [0, 0]]  # of one axis, and of all
        places = x[at[0]], x.reshape((1, 2))[at[1], [0, 0]]
        added = theano.function([x, y], [T.inc_subtensor(each, y) for each in places], mode=mode)
        first = np.iinfo(dtype).max - 8 if dtype != 'float32' else 2 ** 23
        for found in added(np.array([first, 5], dtype), np.int8(3)):
            assert found.dtype == dtype and found.ravel()[0] == first + 6


def test_an_empty_array_has_all_bits():
    x = T.TensorType('uint8', [False])()
    f = theano.function([x], T.elemwise.CAReduce(theano.scalar.and_)(x), mode=theano.Mode('py', None))
    assert f(np.zeros(0, 'uint8')) == 255


def test_names_of_numpy_1():
    assert (np.product([2, 3]), np.Inf, np.string_, np.unicode_) == (6, np.inf, np.bytes_, np.str_)
    assert np.sctype2char('float32') == 'f' and issubclass(np.ComplexWarning, RuntimeWarning) and np.MAXDIMS >= 32
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert np.core._multiarray_umath and np.linalg.linalg
    cast = np.cast[theano.scalar.int8](300)
    assert cast.dtype == 'int8' and cast == 44


def test_small_integers_count_in_64_bits():
    x, sizes, mode = T.bvector(), T.bvector(), theano.Mode('py', None)
    parts = theano.function([x, sizes], T.split(x, sizes, 3), mode=mode)(np.zeros(250, 'int8'), np.int8([100, 100, 50]))
    assert list(map(len, parts)) == [100, 100, 50]
    draws = T.shared_randomstreams.RandomStreams(5).random_integers((4,), 0, 127)
    np.testing.assert_array_equal(theano.function([], draws, mode=mode)(), [52, 89, 33, 84])
    streams, n = MRG_RandomStreams(5), T.bscalar()
    one_of = streams.multinomial(pvals=np.full((200, 2), [0, 1], 'float32'))
    one_of, uniform = theano.function([n], [one_of, streams.uniform((n, n))], mode=mode)(20)
    assert one_of.sum(0).tolist() == [0, 200] and uniform.shape == (20, 20)


def test_a_float_that_single_precision_cannot_hold_is_refused():
    with change_flags(floatX='float64'):
        assert theano.scalar.float32.filter(.5) == np.float32(.5)
        for kind in (theano.scalar.float32, T.TensorType('float32', [])):
            with pytest.raises(TypeError):
                kind.filter(.1)


@pytest.mark.needs_compiler
def test_rows_are_added_as_by_numpy():
    class Rows(AdvancedIncSubtensor1):
        """Theano's op with the code for NumPy 2, on any NumPy."""

        c_support_code = staticmethod(lambda: numpy2.INCREMENT)
        c_code_cache_version = staticmethod(lambda: ())

    types = {'int8': 'int64', 'uint16': 'uint16', 'float32': 'float64', 'float64': 'float32', 'complex64': 'complex128'}
    x = {dtype: T.TensorType(dtype, [False] * 2)() for dtype in types}
    y = {dtype: T.TensorType(types[dtype], [False] * 2)() for dtype in types}
    rows = T.lvector()
    ops = [Rows(), Rows(set_instead_of_inc=True)]
    function = theano.function([*x.values(), *y.values(), rows], [
        op(x[dtype], y[dtype], rows) for dtype in types for op in ops], mode=theano.Mode('c', None))
    random = np.random.RandomState(0)
    for places, cut in [([2, 0, -1, 2], np.s_[:, :]), ([], np.s_[:, :]), ([1, 1], np.s_[::2, ::-1]),
                        ([0, 1, 0], np.s_[:, :0])]:
        at = np.array(places, 'int64')
        arrays = {dtype: (10 * random.randn(8, 6)).astype(dtype)[cut] for dtype in types}
        for values in (random.randn(len(at), 6)[:, cut[1]], random.randn(1, 6)[:, cut[1]]):
            given = {dtype: (10 * values).astype(types[dtype]) for dtype in types}
            results = iter(function(*arrays.values(), *given.values(), at))
            for dtype, each in arrays.items():
                added, changed = each.copy(), each.copy()
                np.add.at(added, at, given[dtype].astype(dtype))
                changed[at] = given[dtype].astype(dtype)
                np.testing.assert_array_equal(next(results), added)
                np.testing.assert_array_equal(next(results), changed)
    for place in (8, -9):
        with pytest.raises(IndexError, match='index %d is out of bounds for axis 0 with size 8' % place):
            function(*(np.ones((8, 6), dtype) for dtype in types), *(np.ones((1, 6), types[dtype]) for dtype in types),
                     np.array([place]))


@pytest.mark.needs_compiler
def test_all_axes_in_c():
    x, mode = T.lvector(), theano.Mode('cvm', None)
    matrix, given = T.fmatrix(), np.array([[3, 1], [2, 5]], 'float32')
    function = theano.function([x, matrix], [T.max(x), T.argmax(x), T.argmax(matrix), T.cumsum(matrix), T.cumprod(x),
                                             x[T.cast(x[:2], 'uint8')]], mode=mode)
    expected = [4, 2, 3, [3, 4, 6, 11], [1, 0, 0], [0, 1]]
    for found, each in zip(function([1, 0, 4], given), expected):
        np.testing.assert_array_equal(found, each)


def test_losses_of_an_epoch_are_added_up_in_double_precision():
    import keras
    logger = keras.callbacks.BaseLogger(stateful_metrics=['count'])
    logger.set_params({'metrics': ['loss', 'count']})
    logger.on_epoch_begin(0)
    for _ in range(3):
        logger.on_batch_end(0, {'size': 7, 'loss': np.array(.1, 'float32'), 'count': np.float32(5)})
    logs = {}
    logger.on_epoch_end(0, logs)
    assert logs == {'loss': 3 * (np.float64(np.float32(.1)) * 7) / 21, 'count': 5}
    assert (logs['loss'].dtype, logs['count'].dtype) == ('float64', 'float32')
