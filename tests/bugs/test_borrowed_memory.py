"""Bugs that were found and fixed, each under its symptom: edits in place of the memory of shared variables."""
import functools
import gc

import theano_mgpu as mgpu
from theano_mgpu.runtime.replicas import borrowed, replicated

import numpy as np
import pytest
import theano
import theano.tensor as T

X = np.random.RandomState(0).randn(7, 6).astype('float32')
MODE = theano.Mode(optimizer='fast_compile')


def buffers():
    """Return arrays to borrow, some of them views: name -> (array, another array with its memory, or None)."""
    whole, columns, base = np.ones((6, 3), 'float32'), np.ones((3, 6), 'float32'), np.ones((9, 3), 'float32')
    return {'whole': (whole, whole), 'view of it': (whole.copy(), None), 'transposed': (columns.T, columns),
            'slice': (base[3:], base)}


@pytest.fixture(params=list(buffers()))
def borrowed_array(request):
    array, other = buffers()[request.param]
    return array, array[1:] if other is None else other


def sums(variable):
    """Return a divided function and plain Theano's, which share a variable; each result depends on all of it."""
    x = T.fmatrix('x')
    outputs = [T.dot(x, variable), T.sqr(T.dot(x, variable)).sum()]
    return mgpu.function([x], outputs, mode=MODE), theano.function([x], outputs, mode=MODE)


def same(functions):
    divided, plain = [function(X) for function in functions]
    for value, expected in zip(divided, plain):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_an_edit_of_a_borrowed_buffer_reached_some_replicas_only(contexts, kind, borrowed_array):
    """Half of the rows had the new weights, the others the old ones."""
    contexts(kind, 2)
    array, other = borrowed_array
    functions = sums(theano.shared(array, borrow=True))
    same(functions)
    for _ in range(2):
        other *= 3
        same(functions)
    same(functions)
    other[-1, 1] += 1
    del other, array, borrowed_array  # the last edit counts, too
    same(functions)


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=[pytest.mark.opencl, pytest.mark.slow])])
def test_a_buffer_that_set_value_borrows(contexts, kind):
    contexts(kind, 2)
    weights, array = theano.shared(np.zeros((6, 3), 'float32')), np.ones((6, 3), 'float32')
    functions = sums(weights)
    same(functions)
    weights.set_value(array, borrow=True)
    same(functions)
    np.random.RandomState(0).shuffle(array)
    array[0] = 7
    same(functions)
    weights.set_value(np.ones((6, 3), 'float32'))
    array[...] = 0
    same(functions)
    assert functions[0](X)[1] > 0


@pytest.mark.parametrize('internal', [False, True])
@pytest.mark.parametrize('when', ['before', 'after'])
def test_a_value_that_get_value_lends(contexts, kind, when, internal):
    """A value that was borrowed before the first call was changed unnoticed; one borrowed afterwards was read-only."""
    contexts(kind, 2)
    weights = theano.shared(np.ones((6, 3), 'float32'))

    def borrow():
        return weights.get_value(borrow=True, return_internal_type=internal)
    lent = borrow() if when == 'before' else None
    functions = sums(weights)
    same(functions)
    if when == 'after':
        lent = borrow()
        if kind == 'gpu':
            with pytest.raises(ValueError, match='read-only'):
                lent[...] = 0
            return
    lent[2:] = 3
    same(functions)
    lent *= 2
    del lent
    same(functions)


@pytest.mark.opencl
def test_an_edit_of_a_variable_on_a_device(contexts):
    """`get_value(borrow=True, return_internal_type=True)` gives the array on a device; the others missed it."""
    contexts('gpu', 2)
    weights = theano.shared(np.ones((6, 3), 'float32'), target='dev0')
    functions = sums(weights)
    same(functions)
    for factor in (2, 3):
        lent = weights.get_value(borrow=True, return_internal_type=True)
        lent[...] = np.full((6, 3), factor, 'float32')
        same(functions)
        np.testing.assert_allclose(functions[0](X)[0], factor * X.sum(1, keepdims=True).repeat(3, 1), rtol=1e-5)


def test_the_containers_of_a_variable(contexts, kind):
    """A container may also hold a scalar, such as a learning rate."""
    contexts(kind, 2)
    scale = theano.shared(np.float32(2), 'scale')
    functions = sums(T.ones((6, 3)) * scale)
    same(functions)
    scale.get_value(borrow=True)[...] = 5
    same(functions)
    np.testing.assert_allclose(functions[0](X)[0], 5 * X.sum(1, keepdims=True).repeat(3, 1), rtol=1e-5)


def test_a_slice_of_a_data_set_that_is_edited(contexts, kind):
    contexts(kind, 2)
    array, i = np.ones((8, 2), 'float32'), T.iscalar('i')
    data = theano.shared(array, borrow=True)
    total = mgpu.function([i], data[i * 4:(i + 1) * 4].sum(), mode=MODE)
    assert [total(0), total(1)] == [8, 8]
    array[:4] *= 10
    assert [total(0), total(1)] == [80, 8]


@pytest.mark.opencl
def test_memory_is_compared_only_while_the_script_refers_to_it(contexts, monkeypatch):
    """Most variables, and every one that is trained, cost no checksum."""
    contexts('gpu', 2)
    asked = []
    monkeypatch.setattr(replicated, 'checksum', lambda value: asked.append(value.shape) or 0)
    array, x = np.ones((6, 3), 'float32'), T.fmatrix('x')
    weights, bias = theano.shared(array, borrow=True), theano.shared(np.zeros(3, 'float32'))
    outputs = (T.dot(x, weights) + bias).sum()
    function = mgpu.function([x], outputs, updates=[(bias, bias + 1)], mode=MODE)
    function(X), function(X)
    assert set(asked) == {(6, 3)}
    del array
    gc.collect()
    function(X)
    del asked[:]
    function(X)
    assert not asked


@pytest.mark.opencl
def test_a_large_buffer_that_is_borrowed_has_a_warning_with_the_way_out(contexts, monkeypatch):
    contexts('gpu', 2)
    monkeypatch.setattr(borrowed, 'LARGE', 10)
    array, x = np.ones((6, 3), 'float32'), T.fmatrix('x')
    with pytest.warns(mgpu.MgpuWarning, match='refers to the memory of the shared variable W .*without borrow=True'):
        mgpu.function([x], T.dot(x, theano.shared(array, 'W', borrow=True)).sum(), mode=MODE)(X)


@pytest.mark.parametrize('in_place', [True, False])
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_a_buffer_of_a_trained_variable_is_as_in_plain_theano(contexts, kind, in_place):
    """Plain Theano updates in place, so a borrowed buffer has the new value, and a write to the buffer counts."""
    contexts(kind, 2)
    mode, found, x = theano.Mode('py' if kind == 'cpu' else 'cvm', 'fast_run'), [], T.fmatrix('x')
    mode = mode if in_place else mode.excluding('inplace')
    for start in (mgpu.disable, functools.partial(mgpu.enable, always=True)):
        start()
        array = np.ones((9, 3), 'float32')
        weights, figures = theano.shared(array[3:], borrow=True), []
        step = theano.function([x], T.dot(x, weights), mode=mode, updates=[(weights, weights * 2 + T.exp(x.mean()))])
        for number in range(3):
            figures += [step(X), array.copy(), weights.get_value()]
            array[5:] = number
            figures += [weights.get_value(), step(X[:4]), array.copy()]
        lent = weights.get_value(borrow=True)
        figures += [step(X), lent.copy()]
        found.append(figures)
    mgpu.disable()
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-5)
    assert (found[0][1][3:] == 1).all() != in_place
