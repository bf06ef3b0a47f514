"""Bugs that were found and fixed, each under its symptom: edits in place of the memory of shared variables."""
import functools
import gc

import theano_mgpu as mgpu
from theano_mgpu.runtime.replicas import borrowed, replicated

import numpy as np
import pytest
import theano
import theano.sparse
import theano.tensor as T
from scipy import sparse

pytestmark = pytest.mark.verified
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


DATA = np.random.RandomState(1).rand(20, 2)
ALWAYS = functools.partial(mgpu.enable, always=True)


def reads(data):
    """Return a function of data alone: of a variable, of its rows, and of expressions of it."""
    v = T.dvector('v')
    return theano.function([v], [T.dot(data - data.mean(axis=0), v), T.dot(data[:17], v), T.dot(data, v)], mode=MODE)


WAYS = {  # to the memory of a variable, which nothing refers to before and after
    'get_value': lambda data, f: data.get_value(borrow=True),
    'internal type': lambda data, f: data.get_value(borrow=True, return_internal_type=True),
    'container': lambda data, f: data.container.value, 'data': lambda data, f: data.container.data,
    'function': lambda data, f: f[data], 'container of a function': lambda data, f: f.container[data].value,
    'clone': lambda data, f: data.clone().get_value(borrow=True),
    'output': lambda data, f: theano.function([], theano.Out(data, borrow=True), mode=MODE)(),
    'part in an output': lambda data, f: theano.function([], theano.Out(data[:9], borrow=True), mode=MODE)(),
}


@pytest.mark.slow_but_with('gpu-data', 'gpu-part in an output', 'gpu-function', 'gpu-internal type', 'gpu-clone',
                           'gpu-container', 'gpu-container of a function')
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.opencl)])
def test_expressions_of_data_follow_edits(contexts, kind, way):
    """`d - d.mean()` and `X[:17]` stayed as they were after `d.get_value(borrow=True)[0] += 3`.

    On devices, so did `d`, where the array came by a container or as an output. Now they follow, or it is an error.
    """
    contexts(kind, 2)
    found = []
    for start in (mgpu.disable, ALWAYS):
        start()
        data, results = theano.shared(DATA), []
        f = reads(data)
        for number in range(3):
            results += f(np.ones(2))
            if number:
                continue
            try:
                WAYS[way](data, f)[number] += 3
            except ValueError as error:
                assert 'read-only' in str(error) and kind == 'gpu' and start is ALWAYS
                return
            kept = WAYS[way](data, f)
            kept[4] += 1
        found.append([*results, data.get_value()])
    mgpu.disable()
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one)
    assert not np.allclose(found[0][0], found[0][3]) and f.mgpu_divided.source.step.inputs.data


def test_variables_that_decide_which_rows_are_read(cpu2):
    """A mask and a scale follow edits; so does a sparse matrix, where a script has the array of its numbers alone."""
    found = []
    for start in (mgpu.disable, ALWAYS):
        start()
        data, mask, scale = theano.shared(DATA), theano.shared(np.arange(20) < 18), theano.shared(np.float64(2))
        matrix = sparse.csr_matrix(DATA)
        numbers, matrix = matrix.data, theano.sparse.shared(matrix, borrow=True)
        v = T.dvector('v')
        functions = [theano.function([v], each, mode=MODE) for each in (
            T.dot(data[mask.nonzero()[0]], v), T.dot(data * scale, v),
            theano.sparse.dot(matrix[:17], v.dimshuffle(0, 'x')))]
        results = [f(np.ones(2)) for f in functions]
        for number in range(2):
            mask.get_value(borrow=True)[number] = False
            scale.get_value(borrow=True)[()] += 1
            numbers[number] += 3
            results += [f(np.ones(2)) for f in functions]
        found.append(results)
    assert [len(each) for each in found[0][::3]] == [18, 17, 16] and all(f.mgpu_divided.source.step for f in functions)
    mgpu.disable()
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one)


def test_data_that_are_not_lent_cost_no_checksum(cpu2, monkeypatch):
    asked = []
    monkeypatch.setattr(replicated, 'checksum', lambda value: asked.append(value.shape) or 0)
    ALWAYS()
    data = theano.shared(DATA)
    f = reads(data)
    for _ in range(3):
        f(np.ones(2)), data.get_value()
    assert not asked
    data.get_value(borrow=True)
    f(np.ones(2))
    assert asked == [(20, 2)] * 2  # as the data were, and as they are in the next call
    f(np.ones(2))
    mgpu.disable()
    assert asked == [(20, 2)] * 2


def descent(grads, params):
    return [(param, param - 0.1 * grad) for param, grad in zip(params, grads)]


def steps(step, batches):
    return (step(*batch) for batch in batches)


def over(step, batches):
    return step.over(batches)


@pytest.mark.slow_with('cpu')
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.opencl)])
def test_batches_that_are_edited_before_their_turn(contexts, kind):
    """The next batch of a list was on the devices already, as it was before."""
    contexts(kind, 2)
    losses = []
    for loop in (steps, over):
        x, w = T.dmatrix('x'), theano.shared(np.ones(2))
        step = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w], descent)
        all_ = [(DATA[:8] + number,) for number in range(4)]
        for number, loss in enumerate(loop(step, all_)):
            losses.append(float(loss))
            all_[(number + 1) % 4][0][...] *= 2
    np.testing.assert_allclose(losses[4:], losses[:4])


@pytest.mark.slow_with('gpu')
def test_a_reader_that_fills_one_array_again_and_again(contexts, kind):
    """Batches were computed from what the reader had put there for later ones."""
    contexts(kind, 2)
    x, buffer = T.dmatrix('x'), np.empty((5, 2))

    def batches():
        for number in range(30):
            buffer[...] = number
            yield buffer
    with mgpu.Predictor([x], x.sum(axis=1), mode=MODE) as predictor:
        assert [outputs.tolist() for outputs in predictor.map(batches())] == [[2.0 * n] * 5 for n in range(30)]


@pytest.mark.slow_with('gpu')
def test_the_containers_of_a_variable(contexts, kind):
    """A container may also hold a scalar, such as a learning rate."""
    contexts(kind, 2)
    scale = theano.shared(np.float32(2), 'scale')
    functions = sums(T.ones((6, 3)) * scale)
    same(functions)
    scale.get_value(borrow=True)[...] = 5
    same(functions)
    np.testing.assert_allclose(functions[0](X)[0], 5 * X.sum(1, keepdims=True).repeat(3, 1), rtol=1e-5)


@pytest.mark.slow_with('gpu')
def test_a_slice_of_a_data_set_that_is_edited(contexts, kind):
    contexts(kind, 2)
    array, i = np.ones((8, 2), 'float32'), T.iscalar('i')
    data = theano.shared(array, borrow=True)
    total = mgpu.function([i], data[i * 4:(i + 1) * 4].sum(), mode=MODE)
    assert [total(0), total(1)] == [8, 8]
    array[:4] *= 10
    assert [total(0), total(1)] == [80, 8]


@pytest.mark.slow
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
