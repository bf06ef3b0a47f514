"""`mgpu.function`."""
import theano_mgpu as mgpu
from theano_mgpu.errors import BatchError, ContextError, GraphError, MgpuWarning
from theano_mgpu.options import Strategy
from theano_mgpu.parallel_function import ParallelFunction

import numpy as np
import pytest
import theano
import theano.tensor as T
from scipy.sparse import csr_matrix
from support.modes import PYTHON
from support.small_models import data, shared
from theano import sparse
from theano.compile.function_module import UnusedInputError

pytestmark = pytest.mark.verified
X = data(11, 5)[0]


@pytest.fixture(scope='module')
def weights():
    return shared(np.random.RandomState(1).randn(5, 3), 'w')


@pytest.mark.cuda
def test_outputs_are_gathered_in_order(contexts, kind, weights):
    contexts(kind, 3)
    x = T.fmatrix('x')
    f = mgpu.function([x], [T.dot(x, weights), x.sum(axis=1)])
    for n in (1, 2, 3, 4, 11):
        product, total = f(X[:n])
        np.testing.assert_allclose(product, X[:n].dot(weights.get_value()), rtol=1e-5)
        np.testing.assert_allclose(total, X[:n].sum(axis=1), rtol=1e-4, atol=1e-6)
        assert type(product) is np.ndarray


@pytest.mark.cuda(opencl='slow')
def test_outputs_are_those_of_the_whole_batch(contexts, kind):
    contexts(kind, 3)
    x = T.fmatrix('x')
    f = mgpu.function([x], [x.mean(), x.sum(axis=0), x, T.gt(x, 0).sum(axis=0), x.T, x.max()])
    mean, total, same, positive, transposed, largest = f(X)
    np.testing.assert_array_equal(transposed, X.T)
    assert largest == X.max()
    np.testing.assert_allclose(mean, X.mean(), rtol=1e-5)
    np.testing.assert_allclose(total, X.sum(axis=0), rtol=1e-4)
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(positive, (X > 0).sum(axis=0))
    assert positive.dtype == 'int64' and mean.dtype == 'float32' and mean.shape == ()


def test_scalars_and_named_inputs_go_whole_to_every_replica(cpu2):
    x, scale, shift = T.fmatrix('x'), T.fscalar('scale'), T.fvector('shift')
    f = mgpu.function([x, scale, shift], x * scale + shift, broadcast=[shift])
    np.testing.assert_allclose(f(X, np.float32(2), X[0]), X * 2 + X[0])
    np.testing.assert_allclose(f(X, shift=X[0], scale=np.float32(2)), X * 2 + X[0])
    with pytest.raises(BatchError, match=r'x has 11, shift has 5 samples.*broadcast=\[shift\]'):
        mgpu.function([x, shift], x * shift)(X, X[0])


def on_host(case):
    """Return inputs, outputs and updates of a graph over slices of data sets, and the names of those on the host."""
    numbers, index = theano.shared(X, 'data'), T.lscalar('index')
    labels, counter = theano.shared(np.arange(11.), 'labels'), theano.shared(np.int64(0), 'counter')
    rows = slice(index * 4, (index + 1) * 4)
    inputs, batch, updates, names = [index], numbers[rows], {}, ['data']
    if case == 'columns':
        batch = theano.shared(X.T.copy(), 'data')[1:, rows].T
    elif case == 'sparse':
        batch = sparse.dense_from_sparse(theano.shared(csr_matrix(X), 'data')[rows])
    elif case == 'two data sets':
        batch, names = batch * T.cast(labels, 'int32')[rows].dimshuffle(0, 'x'), ['data', 'labels']
    elif case == 'a counter':
        inputs, batch, updates = [], numbers[counter * 4:(counter + 1) * 4], {counter: counter + 1}
    elif case == 'read otherwise':
        batch, names = batch - numbers.mean(axis=0), []
    elif case == 'one read otherwise':
        batch = batch * labels[rows].dimshuffle(0, 'x') / labels.sum()
    elif case == 'changed':
        updates, names = {numbers: T.constant(X[::-1])}, []
    elif case == 'undivided':
        batch = T.extra_ops.cumsum(batch, axis=0)
    total = theano.shared(np.float64(0), 'total')
    return inputs, [batch.sum(), T.tanh(batch)], {**updates, total: total + batch.mean()}, names


@pytest.mark.slow_with('two data sets-1', 'columns-1', 'sparse-2', 'two data sets-2')
@pytest.mark.parametrize('micro_batches', [1, 2])
@pytest.mark.parametrize('case', ['rows', 'columns', 'sparse', 'two data sets', 'a counter', 'read otherwise',
                                  'one read otherwise', 'changed', 'undivided'])
def test_slices_of_data_sets_on_the_host(cpu2, case, micro_batches):
    """Data sets that devices need, anyway, stay there."""
    inputs, outputs, updates, names = on_host(case)
    step = ParallelFunction(inputs, outputs, updates, strategy=Strategy(data_sets_on_host=True),
                            micro_batches=micro_batches, mode=PYTHON)
    assert sorted(str(each.variable) for each in step.built.data_sets) == names
    assert not set(step.built.data_sets).intersection(step.executable.variables)
    assert all(each.step_locks for each in step.built.data_sets)  # none is set in the middle of a step
    inputs, outputs, others, _ = on_host(case)
    plain = theano.function(inputs, outputs, updates=list(others.items()), mode=PYTHON)
    for number in (0, 2, 1):  # the last batch has 3 samples
        for one, other in zip(step(*[number][:len(inputs)]), plain(*[number][:len(inputs)])):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    for one, other in zip(updates, others):
        np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-5)


def test_givens_and_shared_data(cpu2, weights):
    samples, x, indices = shared(X, 'samples'), T.fmatrix('x'), T.ivector('indices')
    f = mgpu.function([indices], T.dot(x, weights), givens={x: samples[indices]})
    np.testing.assert_allclose(f(np.array([3, 1, 7], 'int32')), X[[3, 1, 7]].dot(weights.get_value()), rtol=1e-5)
    samples.set_value(X[::-1])
    np.testing.assert_allclose(f(np.array([3], 'int32')), X[::-1][[3]].dot(weights.get_value()), rtol=1e-5)


@pytest.mark.cuda(opencl='slow')
def test_default_updates_are_merged_by_sub_batch_size(contexts, kind):
    """A running mean over an uneven split is the same as on one device."""
    contexts(kind, 3)
    x, running, count = T.fmatrix('x'), shared(np.ones(5), 'running'), theano.shared(np.int64(0), name='count')
    running.default_update = np.float32(0.9) * running + np.float32(0.1) * x.mean(axis=0)
    count.default_update = count + 1
    f = mgpu.function([x], x * 1 + 0 * running + 0 * T.cast(count, 'float32'))
    for n in (11, 4, 2):
        before = running.get_value()
        f(X[:n])
        np.testing.assert_allclose(running.get_value(), 0.9 * before + 0.1 * X[:n].mean(axis=0), rtol=1e-5)
    assert count.get_value() == 3 and count.get_value().dtype == 'int64'


@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_states_that_are_no_means_are_those_of_the_whole_batch(contexts, kind):
    """A count of samples stays an integer; a ratio of sums, and a variance, are not means of the parts' values."""
    contexts(kind, 3)
    x, count = T.fmatrix('x'), theano.shared(np.int64(0), name='count')
    ratio, scale = shared(0, 'ratio'), shared(np.ones(5), 'scale')
    count.default_update = count + x.shape[0]
    ratio.default_update = x.sum() / (x ** 2).sum()
    normal, _, inverse = T.nnet.bn.batch_normalization_train(x, T.ones((1, 5), 'float32'), T.zeros((1, 5), 'float32'))
    scale.default_update = np.float32(0.5) * scale + np.float32(0.5) * T.inv(inverse[0] ** 2)
    f = mgpu.function([x], x * 1 + T.cast(0 * count + 0 * ratio + 0 * scale[0], 'float32'))
    before = scale.get_value()
    f(X[:11])
    assert count.get_value() == 11 and count.get_value().dtype == 'int64'
    np.testing.assert_allclose(ratio.get_value(), X[:11].sum() / (X[:11] ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(scale.get_value(), 0.5 * before + 0.5 * (X[:11].var(axis=0) + 1e-4), rtol=1e-5)


def test_one_context_of_several(contexts, kind):
    active = contexts(kind, 2)
    x = T.fmatrix('x')
    f = mgpu.function([x], x + 1, contexts=[active[1].name])
    np.testing.assert_allclose(f(X), X + 1)
    assert f.contexts == [active[1]]
    with pytest.raises(ContextError, match="context 'dev9' is not mapped; known contexts: "):
        mgpu.function([x], x, contexts=['dev9'])
    for wrong in ([], [active[0].name] * 2):
        with pytest.raises(ContextError, match='each named once'):
            mgpu.function([x], x, contexts=wrong)


@pytest.mark.parametrize('make,message', [
    (lambda x: ([T.fvector('z')], x), 'the graph needs .*x.*, which is not among the inputs'),
    (lambda x: ([x, x], x), 'named twice'),
    (lambda x: ([shared(0, 'w'), x], x), 'is no plain Theano variable'),
    (lambda x: ([theano.In(x, value=shared([[1]], 'w'))], x), 'keeps a value from call to call'),
    (lambda x: ([T.fscalar('s')], T.as_tensor(1.0)), 'no input has samples to split'),
])
def test_graphs_that_cannot_be_run(cpu2, make, message):
    with pytest.raises(GraphError, match=message):
        mgpu.function(*make(T.fmatrix('x')))


def test_wrong_options(cpu2):
    x = T.fmatrix('x')
    with pytest.raises(GraphError, match='broadcast names .* no inputs'):
        mgpu.function([x], x, broadcast=[T.fvector('y')])
    with pytest.raises(GraphError, match='broadcast is a list of inputs'):
        mgpu.function([x], x, broadcast=x)
    with pytest.raises(GraphError, match='samples is a dictionary of inputs'):
        mgpu.function([x], x, samples=[x])
    with pytest.raises(mgpu.MgpuError, match='none of auto, serial, threads'):
        mgpu.function([x], x, executor='fast')


def test_wrong_arguments(cpu2):
    x = T.fmatrix('x')
    f = mgpu.function([x], x * 1)
    with pytest.raises(BatchError, match=r'input x \(TensorType\(float32, matrix\)\) cannot take what was given'):
        f(X[0])
    with pytest.raises(BatchError, match='input x'):
        f(X.astype('float64'))
    with pytest.raises(BatchError, match='the batch is empty'):
        f(X[:0])
    with pytest.raises(TypeError, match='no value was given for x'):
        f()
    with pytest.raises(TypeError, match="'y' is no input; the inputs are"):
        f(X, y=X)
    with pytest.raises(TypeError, match='given twice'):
        f(X, x=X)
    with pytest.raises(TypeError, match='2 arguments were given'):
        f(X, X)
    np.testing.assert_array_equal(f(X), X)


@pytest.mark.unverified
def test_timings(cpu2):
    x = T.fmatrix('x')
    f = mgpu.function([x], x * 1)
    f(X), f(X)
    assert f.timings.calls == 2
    assert f.timings.per_call()['run'] > 0 and f.timings.per_call()['all_reduce'] == 0
    f.timings.reset()
    assert f.timings.calls == 0


def test_the_flag_chooses_the_executor(cpu2):
    x = T.fmatrix('x')
    from theano_mgpu.utils.executors import Executor, ThreadsExecutor
    with theano.configparser.change_flags(**{'mgpu.executor': 'threads'}):
        assert isinstance(mgpu.function([x], x).executable.launcher.executor, ThreadsExecutor)
    assert type(mgpu.function([x], x).executable.launcher.executor) is Executor


def test_inputs_that_are_not_used(cpu2):
    """They are ignored, unless the caller asks for a warning, or for the error of Theano's own function."""
    x, y, z = T.fmatrix('x'), T.fvector('y'), T.fvector('z')
    with pytest.raises(UnusedInputError, match=r'the inputs \[y\] are not used. Leave them out, or pass'):
        mgpu.function([x, theano.In(y)], 2 * x, mode=PYTHON, on_unused_input='raise')
    with pytest.warns(MgpuWarning, match=r'the inputs \[y\] are not used'):
        warned = mgpu.function([x, y], 2 * x, mode=PYTHON, on_unused_input='warn')
    ignored = mgpu.function([x, y], 2 * x, mode=PYTHON)
    given = mgpu.function([x, y], x.sum(axis=1) + z, givens={z: y}, mode=PYTHON, on_unused_input='raise')
    lengths = X.sum(axis=1)
    for f in warned, ignored:
        np.testing.assert_array_equal(f(X, lengths), 2 * X)
    np.testing.assert_allclose(given(X, lengths), 2 * lengths, rtol=1e-5)


def test_some_outputs_of_a_dict(cpu2):
    x = T.fmatrix('x')
    f = mgpu.function([x], {'twice': 2 * x, 'sum': x.sum(axis=1)}, mode=PYTHON)
    np.testing.assert_array_equal(f(X, output_subset=['twice'])['twice'], 2 * X)
    g = mgpu.function([x], [2 * x, x.sum(axis=1)], mode=PYTHON)
    np.testing.assert_array_equal(g(X, output_subset=[0])[0], 2 * X)
    for subset, error in [((0,), RuntimeError), ([0.], RuntimeError), ([2], IndexError)]:
        with pytest.raises(error):
            g(X, output_subset=subset)
