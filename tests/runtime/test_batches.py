"""Bugs that were found and fixed, each under its symptom: arguments, and the batch after this one."""

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from scipy.sparse import csr_matrix
from support.faulty_executor import faulty
from support.modes import PYTHON
from support.small_models import data, dense_model, momentum
from theano import sparse
from theano.configparser import change_flags
from theano.printing import Print

pytestmark = pytest.mark.verified


def test_two_inputs_without_names_get_each_its_own_argument(cpu2):
    """Inputs were distinguished by their text. Without names that is their type, so that both got the last argument."""
    a, b = theano.tensor.fmatrix(), theano.tensor.fmatrix()
    first, second = data(5, 3)[0], data(5, 3, seed=1)[0]
    np.testing.assert_array_equal(mgpu.function([a, b], a - b)(first, second), first - second)


def test_batches_of_one_input_are_taken_as_bare_arrays(cpu2):
    """Each array was taken apart into its rows: "9 arguments were given for the inputs ['x']"."""
    x, w = T.fmatrix('x'), theano.shared(np.ones(7, 'float32'), 'w')
    step = mgpu.training_function([x], T.dot(x, w).mean(), [w], lambda gradients: {w: w - gradients[0]},
                                  mode='FAST_COMPILE')
    assert len(list(step.over([data(9, 7)[0], data(5, 7)[0]]))) == 2


@pytest.mark.slow_but_with('float64-list-csr', 'float32-list-csc', 'float32-list-csr', 'float64-list-csc')
@pytest.mark.parametrize('how, form', [
    ('rows', 'csr'), ('rows', 'csc'), ('givens', 'csr'), ('structured', 'csr'), ('columns', 'csr'),
    ('some columns', 'csc'), ('from the first', 'csr'), ('list', 'csr'), ('list', 'csc')])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_slices_of_a_sparse_data_set_are_divided(how, form, dtype, cpu2):
    """They were listed as "no batch enters it", where slices of dense data sets are divided."""
    x, y = data(23, 6)[0].astype(dtype), data(23, 3, seed=1)[0].astype(dtype)
    data_set, targets = theano.shared(csr_matrix(x * (x > 0)).asformat(form), 'data'), theano.shared(y, 'targets')

    def trained():
        w, i, givens = theano.shared(np.ones((6, 3), dtype), 'w'), T.lscalar('i'), {}
        rows = slice(None if how == 'from the first' else i * 5, (i + 1) * 5)
        if how == 'list':
            i = T.lvector('i')
            total = T.sqr(sparse.dot(sparse.get_item_list(data_set, i), w) - targets[i]).mean()
        elif how == 'givens':
            batch, of_batch = sparse.csr_matrix('batch', dtype), T.matrix('of the batch', dtype)
            givens = {batch: data_set[rows], of_batch: targets[rows]}
            total = T.sqr(sparse.dot(batch, w) - of_batch).mean()
        elif how == 'columns':
            total = T.sqr(sparse.dot(data_set[rows, :4], w[:4])).sum()
        elif how == 'some columns':
            total = T.sqr(sparse.dot(data_set[rows][:, 1:5], w[:4])).sum()
        else:
            total = T.sqr((sparse.structured_dot if how == 'structured' else sparse.dot)(data_set[rows], w)).mean()
        f = theano.function([i], total, updates=[(w, w - T.cast(0.1, dtype) * T.grad(total, w))], givens=givens,
                            mode=PYTHON)
        return [f(np.arange(n, n + 6) if how == 'list' else n) for n in (0, 3, 4)], w.get_value()
    expected = trained()
    report = mgpu.enable(always=True)
    try:
        found = trained()
    finally:
        mgpu.disable()
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5 if dtype == 'float32' else 1e-12)
    assert report.usages[-1].calls == 3 and report.usages[-1].contexts == cpu2, report


def test_slices_of_the_columns_of_a_sparse_data_set_are_no_batch(cpu2):
    matrix, i = np.arange(24.).reshape(4, 6), T.lscalar('i')
    data_set = theano.shared(csr_matrix(matrix), 'data')
    report = mgpu.enable(always=True)
    try:
        f = theano.function([i], sparse.sp_sum(data_set[:, i * 2:(i + 1) * 2], axis=1), mode=PYTHON)
    finally:
        mgpu.disable()
    np.testing.assert_array_equal(f(1), matrix[:, 2:4].sum(axis=1))
    assert not report.usages[-1].contexts and report.usages[-1].why == 'no batch enters it'


def test_a_function_that_sets_a_variable_to_a_number_or_an_array(cpu2):
    """"AttributeError: 'int' object has no attribute 'owner'", where the function had nothing else to do."""
    n, c = theano.shared(3), theano.shared(np.zeros(3))
    report = mgpu.enable(always=True)
    try:
        reset = theano.function([], [], updates=[(n, 1), (c, np.ones(3))], mode=PYTHON)
    finally:
        mgpu.disable()
    reset()
    assert n.get_value() == 1 and (c.get_value() == 1).all() and report.usages[-1].why == 'no batch enters it'


@pytest.mark.parametrize('how', ['drawn', 'one'])
def test_the_summary_of_a_mini_batch_that_is_not_divided(how, cpu2):
    """It said that no batch enters the function."""
    x, i = theano.shared(np.random.RandomState(0).rand(40, 3), 'X'), T.lscalar('i')
    drawn = T.shared_randomstreams.RandomStreams(1).random_integers((5,), 0, 39)
    report = mgpu.enable(always=True)
    try:
        f = theano.function([] if how == 'drawn' else [i], x[drawn if how == 'drawn' else i].sum(), mode=PYTHON)
    finally:
        mgpu.disable()
    f(*[] if how == 'drawn' else [3])
    assert report.usages[-1].why == 'it picks rows of X in a way that is not divided'


def test_samples_of_a_sparse_matrix_that_are_picked_by_their_place_are_not_divided(cpu2):
    s, i = sparse.csr_matrix('s', dtype='float64'), T.lvector('i')
    matrix = csr_matrix(np.eye(4))
    with pytest.warns(mgpu.MgpuWarning, match='it slices along the samples'):
        f = mgpu.function([s], s[1:] * 2, mode=PYTHON)
    np.testing.assert_array_equal(f(matrix).toarray(), 2 * np.eye(4)[1:])
    with pytest.warns(mgpu.MgpuWarning, match='other samples of the matrix would be asked for'):
        f = mgpu.function([s, i], sparse.get_item_list(s, i) * 2, mode=PYTHON)
    np.testing.assert_array_equal(f(matrix, [3, 1, 1, 0]).toarray(), 2 * np.eye(4)[[3, 1, 1, 0]])


def quick_step(model):
    return mgpu.training_function(model.inputs, model.loss, model.params, momentum)


@pytest.mark.slow
def test_no_room_for_the_next_batch_does_not_undo_this_one(gpu2):
    """The next batch is sent within the step: its MemoryError undid the step, and was raised a batch too early."""
    x, labels = data(24, 7)
    parts = [(x[i:i + 8], labels[i:i + 8]) for i in range(0, 24, 8)]
    model, reference = dense_model(), dense_model()
    expected = list(quick_step(reference).over(parts))
    step = quick_step(model)
    executor = faulty(step)
    executor.inject(MemoryError('no room on the device'), run=2)  # after sending and launching the first batch
    np.testing.assert_allclose(list(step.over(parts)), expected, rtol=1e-6)
    assert executor.struck == 2  # a task for each replica
    np.testing.assert_allclose(model.params[0].get_value(), reference.params[0].get_value(), rtol=1e-6)


@pytest.mark.slow
def test_a_bad_batch_of_a_generator_does_not_undo_the_one_before(gpu2, monkeypatch):
    """The shape of the next batch is checked within the step before it, which was then rolled back."""
    from theano_mgpu.keras import multi_gpu_model
    from theano_mgpu.keras.hooks import prefetch

    import keras
    from keras.layers import Dense
    from keras.models import Sequential
    x, y = data(8, 6)[0], data(8, 3, seed=1)[0]
    next_of_queue, next_batches = prefetch.next_of_queue, []

    def next_once_made(enqueuer):
        enqueuer.queue.queue[0].wait(30)
        next_batches.append(next_of_queue(enqueuer))
        return next_batches[-1]
    monkeypatch.setattr(prefetch, 'next_of_queue', next_once_made)

    class Begun(keras.callbacks.Callback):  # one that is called after a batch keeps the next one from being looked at
        batches = 0

        def on_batch_begin(self, batch, logs=None):
            self.batches += 1

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (x, y) if index == 0 else (x[:, 1:], y)
    found = []
    for bad in (True, False):
        np.random.seed(3)
        model = multi_gpu_model(Sequential([Dense(3, input_shape=(6,))]))
        model.compile('sgd', 'mse')
        callback = Begun()
        if bad:
            with pytest.raises(ValueError, match='to have shape'):
                model.fit_generator(Batches(), epochs=1, shuffle=False, verbose=0, callbacks=[callback])
            assert callback.batches == 2 and len(model.train_function.function.contexts) == 2
            assert next_batches[0][0].shape == (8, 5)  # seen within the first step
        else:
            model.train_on_batch(x, y)
        found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('options', [{}, {'micro_batches': 2}, {'update_on': 'device'}])
def test_the_whole_value_is_printed_once(options, cpu2):
    """Each context printed its part of the batch, its part of a sum, and a copy of each constant value."""
    printed = []

    def shown(name, variable):
        return Print(name, global_fn=lambda op, value: printed.append((name, np.array(value))))(variable)
    x = T.matrix('x')
    start = np.random.RandomState(0).randn(3, 2).astype(x.dtype)
    ours, theanos = theano.shared(start, name='ours'), theano.shared(start, name='theanos')

    def loss_of(w):
        hidden = shown('hidden', T.dot(shown('x', x), w))
        return shown('loss', (shown('twice', 2 * hidden) ** 2).mean())

    def new(w, gradient):
        return w - 0.1 * shown('gradient', gradient)
    loss = loss_of(ours)
    step = mgpu.training_function([x], loss, [ours], lambda gradients: {ours: new(ours, gradients[0])}, mode=PYTHON,
                                  **options)
    loss = loss_of(theanos)
    plain = theano.function([x], loss, updates=[(theanos, new(theanos, T.grad(loss, theanos)))], mode=PYTHON)
    for n in (7, 4):
        batch = np.random.RandomState(n).randn(n, 3).astype(x.dtype)
        results = []
        for function in (step, plain):
            printed.clear()
            function(batch)
            results.append(dict(printed))
            assert len(printed) == 5
        found, expected = results
        assert set(found) == set(expected)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


def test_what_a_loop_prints_keeps_it_on_one_device(cpu2):
    """Each context would print its part in each pass of the loop."""
    x = T.matrix('x')
    sums, _ = theano.scan(lambda column, before: Print('sum', global_fn=lambda op, value: None)(before + column),
                          sequences=x.T, outputs_info=T.zeros_like(x[:, 0]))
    with pytest.warns(mgpu.MgpuWarning, match='each replica would call Print'):
        f = mgpu.function([x], sums[-1], mode=PYTHON)
    np.testing.assert_array_equal(f(np.ones((5, 3), x.dtype)), [3] * 5)


VECTOR, OTHER, MATRIX = T.fvector('x'), T.fvector('y'), T.fmatrix('m')
TWO = theano.shared(np.arange(2, dtype='float32'), name='two')


@pytest.mark.parametrize('inputs, output, lengths', [
    ([VECTOR, OTHER], VECTOR * OTHER, (4, 2)),
    ([VECTOR, OTHER], T.sqr(VECTOR - OTHER).mean(), (2, 1)),
    ([VECTOR], VECTOR + TWO, (4,)),
    ([VECTOR], (VECTOR * T.constant(np.ones(2, 'float32'))).sum(), (4,)),
    ([MATRIX, OTHER], T.dot(OTHER, MATRIX), (4, 2)),
    ([MATRIX, OTHER], (MATRIX * OTHER.dimshuffle(0, 'x')).sum(axis=0), (6, 3)),
], ids=str)
def test_what_has_as_many_rows_as_a_replica_alone_is_an_error_as_on_one_device(inputs, output, lengths, cpu2):
    """Each replica took the whole array for the rows of its samples: [1 2 3 4] * [1 2] was [1 4 3 8]."""
    given = [np.ones((length,) + (3,) * (variable.ndim - 1), 'float32') for variable, length in zip(inputs, lengths)]
    mgpu.enable(always=True)
    try:
        function = theano.function(inputs, output, mode='FAST_COMPILE')
        for _ in range(2):
            with pytest.raises(ValueError, match='(?i)mismatch|could not be broadcast|not aligned|shape'):
                function(*given)
    finally:
        mgpu.disable()


@pytest.mark.slow
@pytest.mark.parametrize('value', ['raise', 'warn'])
def test_graphs_of_the_package_have_no_test_values(value, cpu2, recwarn):
    """The flag compute_test_value=raise led to "Cannot compute test value: input 0 of Op Shape_i missing"."""
    x, w = T.fmatrix('x'), theano.shared(np.ones((3, 3), 'float32'), name='w')
    x.tag.test_value = np.ones((2, 3), 'float32')
    given = np.arange(15, dtype='float32').reshape(5, 3)
    with change_flags(compute_test_value=value):
        hidden = T.dot(x, w)
        outputs = [hidden - hidden.mean(axis=0), hidden.reshape((x.shape[0], -1)).sum()]
        one = theano.function([x], outputs, mode='FAST_COMPILE')(given)
        mgpu.enable(always=True)
        try:
            function = theano.function([x], outputs, mode='FAST_COMPILE')
            found = function(given)
        finally:
            mgpu.disable()
        step = mgpu.training_function([x], T.sqr(hidden).mean(), [w], lambda gradients: {w: w - gradients[0]},
                                      mode='FAST_COMPILE')
        step(given)
        assert theano.config.compute_test_value == value
    assert function.mgpu_divided and not [str(each.message) for each in recwarn if 'test value' in str(each.message)]
    for ours, theirs in zip(found, one):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# --- The axis of the batch --------------------------------------------------------------------------

def divided(script, n_samples):
    """Check that a script gives the figures of plain Theano, and that its functions divide so many samples a call."""
    expected = list(script())
    report = mgpu.enable(always=True)
    try:
        found = list(script())
    finally:
        mgpu.disable()
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert [usage.samples / max(1, usage.calls) for usage in report.usages] == n_samples, report


def numbers(*shape):
    return np.random.RandomState(sum(shape)).randn(*shape)


def hessian_products(centred=False):
    """Yield products of a Hessian with vectors in the shapes of weights, as TRPO asks for."""
    params = [theano.shared(numbers(*shape) / 3) for shape in [(2, 8), (8,), (8, 2), (2,), (2,)]]
    w1, b1, w2, b2, s = params
    x, mean, spread, vectors = T.dmatrix('x'), T.dmatrix('mean'), T.dmatrix('spread'), [p.type() for p in params]
    new = T.dot(T.tanh(T.dot(x - x.mean(axis=0) * float(centred), w1) + b1), w2) + b2
    deviation = T.exp(2 * (T.zeros_like(new) + s))
    cost = ((T.sqr(mean - new) + T.exp(spread)) / deviation + T.log(deviation)).sum(axis=1).mean()
    along = sum((a * b).sum() for a, b in zip(T.grad(cost, params), vectors))
    f = theano.function([x, mean, spread, *vectors], T.concatenate([v.flatten() for v in T.grad(along, params)]),
                        mode=PYTHON)
    for n in (13, 5):
        yield f(*[numbers(n, 2) + i for i in range(3)], *[numbers(*p.get_value().shape) for p in params])


@pytest.mark.slow
@pytest.mark.parametrize('centred', [False, True])
def test_features_that_most_arguments_share_are_not_divided(centred, cpu2):
    """The 2 features were, in several stages that exchanged arrays with a row for each of the samples."""
    divided(lambda: hessian_products(centred), [9])


def test_the_longest_length_is_divided_where_others_cost_as_much(cpu2):
    x, mean, deviation = T.dmatrix('x'), T.dvector('mean'), T.dvector('deviation')

    def density():
        f = theano.function([x, mean, deviation], T.sqr((x - mean) / deviation).sum(), mode=PYTHON)
        yield f(numbers(9, 2), numbers(2), np.ones(2))
    divided(density, [9])


STEPS, BATCH = 4, 7


def language_model(how, wide=False):
    """Yield figures of words in an order (time, batch), or (batch, time): the states of a batch are kept."""
    words = np.random.RandomState(0).randint(0, 9, (5 * STEPS, BATCH)).astype('int32')
    data, i, x = theano.shared(words.T if how == 'slices of columns' else words, 'data'), T.lscalar('i'), T.imatrix('x')
    params = e, w, u = [theano.shared(numbers(*shape) / 3) for shape in [(9, 5), (5, 5), (5, 9)]]
    state = theano.shared(np.zeros((BATCH, 5)), 'state')
    h, cost = state, 0.
    for t in range(STEPS - 1):
        h = T.tanh(e[x[t]] + T.dot(h, w))
        cost += T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(h, u)), x[t + 1]).mean()
    updates = [(p, p - .3 * g) for p, g in zip(params, T.grad(cost, params))] + [(state, h)]
    rows = slice(i * STEPS, (i + 1) * STEPS)
    part = {'slices': data[rows], 'slices of columns': data[:, rows].T, 'of all columns': data[rows, :BATCH]}.get(how)
    f = theano.function([x] if part is None else [i], cost, updates=updates, mode=PYTHON,
                        givens={} if part is None else {x: part})
    for k in (0, 3, 1):
        yield f(words[k * STEPS:(k + 1) * STEPS] if part is None else k)
    yield from [p.get_value() for p in [*params, state]]


@pytest.mark.slow_but_with('2-argument')
@pytest.mark.parametrize('how', ['argument', 'slices', 'slices of columns', 'of all columns'])
@pytest.mark.parametrize('n', [2, 3])
def test_a_batch_along_the_second_axis_of_all_that_comes_in_is_divided(how, n, contexts):
    """It ran whole: "it picks samples by their place in the batch"."""
    contexts('cpu', n)
    divided(lambda: language_model(how), [BATCH])


def test_steps_whose_mean_a_network_reads_are_no_batch(cpu2):
    """They were divided, and the network computed whole."""
    x, e, w = T.imatrix('x'), theano.shared(numbers(9, 5)), theano.shared(numbers(5, 3))

    def bags():
        f = theano.function([x], T.nnet.softmax(T.dot(e[x].mean(axis=0), w)), mode=PYTHON)
        for steps, n in ((6, 5), (3, 8)):
            yield f(np.random.RandomState(n).randint(0, 9, (steps, n)).astype('int32'))
    divided(bags, [6.5])


def test_features_are_no_batch_where_samples_meet(cpu2):
    x = T.dmatrix('x')

    def processes():
        f = theano.function([x], T.log(T.diag(T.slinalg.cholesky(T.dot(x, x.T)))).sum(), mode=PYTHON)
        yield f(numbers(4, 6))
    divided(processes, [0])


def test_columns_that_a_parameter_is_solved_for_are_divided(cpu2):
    """They ran whole: "Solve takes its matrix as a whole, and all samples meet there"."""
    data, b = theano.shared(numbers(23, 3), 'data'), T.dmatrix('b')
    mean, factor, half = T.dvector('mean'), T.dmatrix('factor'), np.linalg.cholesky(np.eye(3) + .3)

    def densities():
        solved = T.slinalg.solve_lower_triangular(factor, (data - mean).T)
        density = -T.sqr(solved).sum() / 2 - 23 * T.log(T.diag(factor)).sum()
        f = theano.function([mean, factor], [density, *T.grad(density, [mean, factor])], mode=PYTHON)
        solved = T.slinalg.solve(factor.T, T.slinalg.solve_upper_triangular(factor.T, b.T))
        norms = T.sqr(solved).sum(axis=0)
        g = theano.function([b, factor], [norms, *T.grad(norms.sum(), [b, factor])], mode=PYTHON)
        for k in (5, 8):
            yield from f(np.ones(3) * k, half) + g(numbers(k, 3), half)
    divided(densities, [23, 6.5])


@pytest.mark.parametrize('n', [1, 2])
def test_the_length_that_most_arguments_share_is_the_batch_of_one_context(n, contexts):
    """One context divides nothing, so that the longest length costs as little. Where memory is short, it will."""
    contexts('cpu', n)
    x, mask, y = T.dmatrix('x'), T.dmatrix('mask'), T.dvector('y')

    def means():
        f = theano.function([x, mask, y], T.sqr((x * mask).sum(axis=0) / mask.sum(axis=0) - y).sum(), mode=PYTHON)
        yield f(numbers(9, 4), 1 + numbers(9, 4) ** 2, numbers(4))
    divided(means, [4])
