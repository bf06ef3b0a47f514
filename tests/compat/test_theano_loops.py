"""Loops of Theano's ops on the host: faster, and the same results bit by bit."""
import re

from theano_mgpu.compat.theano_loops import HOT, LOOPING, NO_BRANCHES, POOLING, options

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiled_ops import assembly, one_module, use_theanos_own, x86_64
from theano.tensor.elemwise import CAReduce, Elemwise
from theano.tensor.signal.pool import MaxPoolGrad, Pool

pytestmark = pytest.mark.needs_compiler
f32 = np.float32
BRANCH_ON_EQUAL_VALUES = re.compile(r'ucomiss.*\n\s*(jp|jne|je)\b')


def adam():
    """Return inputs and new values of Keras's Adam."""
    p, m, v, g = T.fvectors('pmvg')
    new_m, new_v = f32(.9) * m + f32(.1) * g, f32(.999) * v + f32(.001) * T.sqr(g)
    new_p = p - f32(.01) * new_m / (T.sqrt(T.clip(new_v, f32(0), f32(np.inf))) + f32(1e-7))
    return [p, m, v, g], [new_p, new_m, new_v]


def adam_in_place(linker):
    inputs, outputs = adam()
    borrowed = [theano.In(variable, mutable=True, borrow=True) for variable in inputs]
    return one_module(borrowed, outputs, 'fast_run', linker)


@pytest.mark.slow
@x86_64
def test_a_loop_is_vectorised(tmp_path, monkeypatch):
    nodes = adam_in_place('py').maker.fgraph.apply_nodes
    node, = [node for node in nodes if 'sqrt' in str(node.op)]
    assert 'sqrtps' in assembly(node, tmp_path)
    use_theanos_own(monkeypatch, Elemwise, LOOPING)
    assert 'sqrtps' not in assembly(node, tmp_path)


def test_gcc_14_and_later_keep_a_clip_without_branches():
    assert [options(version) for version in ('', '12.2.0', '14.2.0')] == [[], [HOT], [HOT, NO_BRANCHES]]


@pytest.mark.slow
def test_results_stay_the_same_bit_by_bit(monkeypatch):
    vectorised = adam_in_place('c')
    use_theanos_own(monkeypatch, Elemwise, LOOPING)
    plain = adam_in_place('c')
    for n in (0, 1, 7, 16, 1003):
        given = np.random.RandomState(n).randn(4, n).astype('float32')
        given[2] = abs(given[2])
        strided = np.repeat(given, 2, axis=1)[:, ::2]
        expected = plain(*given.copy())
        for values in (given.copy(), strided):  # an output may take the memory of an input
            for found, each in zip(vectorised(*values), expected):
                np.testing.assert_array_equal(found, each)


def max_pooling_gradients(cases):
    """Return values, maxima and gradients of each case, and the gradients of the values, all symbolic."""
    given = [[T.TensorType('float32', [False] * (ndim + 2))() for _ in range(3)] for ndim, _ in cases]
    return given, [MaxPoolGrad(ignore_border=True, ndim=ndim)(*each, *window)
                   for each, (ndim, window) in zip(given, cases)]


@pytest.mark.slow
@x86_64
def test_max_pooling_has_no_branch_on_the_maximum(tmp_path, monkeypatch):
    _, (gradient,) = max_pooling_gradients([(2, [(2, 2)])])
    node = gradient.owner
    assert not BRANCH_ON_EQUAL_VALUES.search(assembly(node, tmp_path))
    use_theanos_own(monkeypatch, MaxPoolGrad, POOLING)
    assert BRANCH_ON_EQUAL_VALUES.search(assembly(node, tmp_path))


POOLED = [(2, [(3, 2), (1, 1), (1, 0)]),  # windows overlap, and lie over the border
          (1, [(3,), (3,), (0,)]), (2, [(2, 2), (2, 2), (0, 0)]), (3, [(2, 2, 2), (2, 1, 2), (0, 1, 0)])]


@pytest.mark.slow
@pytest.mark.parametrize('cases', [POOLED[:1], POOLED[1:]],
                         ids=['overlapping', 'others'])
def test_gradients_of_max_pooling_stay_the_same_bit_by_bit(cases, monkeypatch):
    random = np.random.RandomState(0)
    arguments = []
    for ndim, window in cases:
        values = random.randint(-1, 3, (2, 3, 7, 6, 5)[:ndim + 2]).astype('float32')  # windows have several maxima
        values.flat[:5] = -0., np.nan, np.inf, -np.inf, 0.
        pool = Pool(ignore_border=True, mode='max', ndim=ndim)(values, *window)
        maxima = theano.function([], pool, mode='FAST_COMPILE')()
        gradients = random.randn(*maxima.shape).astype('float32')
        gradients.flat[:5] = -0., np.nan, np.inf, -np.inf, 0.
        arguments += [values, maxima, gradients]
    given, expressions = max_pooling_gradients(cases)
    ours = one_module(sum(given, []), expressions)
    use_theanos_own(monkeypatch, MaxPoolGrad, POOLING)
    theanos = one_module(sum(given, []), expressions)
    for case, found, expected in zip(cases, ours(*arguments), theanos(*arguments)):
        np.testing.assert_array_equal(found.view('int32'), expected.view('int32'), err_msg=str(case))
        assert (found != 0).any()


SUMS = [('float32', 'float64'), ('float32', 'float32'), ('float64', 'float64'), ('int8', 'int64')]  # and accumulator


@pytest.mark.slow
@x86_64
def test_sums_of_rows_are_vectorised(tmp_path, monkeypatch):
    node = T.sum(T.ftensor3(), axis=(0, 1), acc_dtype='float64').owner
    assert 'addpd' in assembly(node, tmp_path)
    use_theanos_own(monkeypatch, CAReduce, LOOPING)
    assert 'addpd' not in assembly(node, tmp_path)


@x86_64
def test_eight_sums_are_computed_at_once(tmp_path, monkeypatch):
    """The sum over all axes but the axis of the filters is the gradient of a bias after a convolution."""
    node = T.sum(T.ftensor4().dimshuffle(0, 2, 3, 1), axis=(0, 1, 2), acc_dtype='float64').owner
    additions = 'add[sp]d'
    assert len(re.findall(additions, assembly(node, tmp_path))) >= 8
    use_theanos_own(monkeypatch, CAReduce, LOOPING)
    assert len(re.findall(additions, assembly(node, tmp_path))) < 8


@pytest.mark.slow
@pytest.mark.parametrize('dtypes', [SUMS[:1], SUMS[1:]])
def test_sums_stay_the_same_bit_by_bit(dtypes, monkeypatch):
    inputs = [T.TensorType(dtype, [False] * 3)() for dtype, _ in dtypes]
    axes = [0, (0, 1), (0, 2), 2, None]
    sums = [T.sum(x, axis=axis, dtype=dtype, acc_dtype=acc_dtype)
            for x, (dtype, acc_dtype) in zip(inputs, dtypes) for axis in axes]
    ours = one_module(inputs, sums)
    use_theanos_own(monkeypatch, CAReduce, LOOPING)
    theanos = one_module(inputs, sums)
    for shape in [(5, 7, 19), (0, 7, 19), (5, 0, 3), (5, 7, 0), (1, 1, 1)]:
        given = [(100 * np.random.RandomState(0).randn(*shape)).astype(dtype) for dtype, _ in dtypes]
        for each in given:
            if each.dtype.kind == 'f' and each.size > 9:
                each.flat[:9:2] = -0., np.nan, np.inf, -np.inf, 1e30
        for layout in (np.array, np.asfortranarray, lambda values: np.repeat(values, 2, axis=2)[:, :, ::2]):
            values = [layout(each) for each in given]
            for total, found, expected in zip(sums, ours(*values), theanos(*values)):
                np.testing.assert_array_equal(found, expected, err_msg='%s of %s' % (total.owner, shape))
