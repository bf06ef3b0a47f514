"""What replicas compute of a batch, and what is made of it together."""
from theano_mgpu.samples import analyse
from theano_mgpu.statistics import BatchUpdates, mean_exact, partial

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import shared

X = np.random.RandomState(0).randn(7, 3).astype('float32')
PYTHON = theano.Mode('py', None)
PARTS = [(0, 4), (4, 6), (6, 7)]
x, w, scale = T.fmatrix('x'), shared([1, 2, 3], 'w'), T.fscalar('scale')


def evaluate(outputs, *values):
    return theano.function([x, scale], outputs, mode=PYTHON, on_unused_input='ignore')(*values)


@pytest.mark.parametrize('expression', [
    x.sum(), x.mean(), (w ** 2).sum(), x.sum() + x.mean() + w.sum(), 2 * T.dot(x, w).sum() - (x ** 2).mean() / 3,
    T.stack([x.sum(), x.mean()]).sum(), x.sum() + x.sum() / T.cast(x.shape[0], 'float32'),
    T.switch(T.gt(w.sum(), 0), x.sum(), x.mean()), x.sum() * x.shape[0] / x.shape[0]], ids=str)
def test_the_mean_over_parts_is_that_of_the_batch(expression):
    exact = mean_exact(expression, analyse([expression], [x]), scale)
    parts = [evaluate(exact, X[a:b], np.float32(7 / (b - a))) for a, b in PARTS]
    total = sum(part * (b - a) / 7 for part, (a, b) in zip(parts, PARTS))
    np.testing.assert_allclose(total, evaluate(expression, X, np.float32(1)), rtol=1e-5)
    assert exact.dtype == expression.dtype


def updates_over_parts(new):
    """The new value of one state, from the statistics of parts."""
    updates = BatchUpdates(new, [x], mode=PYTHON)
    parts = [evaluate(updates.statistics, X[a:b], np.float32(1)) for a, b in PARTS]
    weights = [(b - a) / 7 for a, b in PARTS]
    whole = [partial(values, how, weights).astype(values[0].dtype)
             for values, how in zip(zip(*parts), updates.reductions)]
    return updates, updates.new_values(whole)


def moments():
    return T.nnet.bn.batch_normalization_train(x, T.ones((1, 3), 'float32'), T.zeros((1, 3), 'float32'))


@pytest.mark.parametrize('make', [
    lambda s: 0.5 * s + 0.5 * x.mean(axis=0), lambda s: s + x.sum(axis=0), lambda s: x.sum(axis=0) / (x ** 2).sum(),
    lambda s: s + T.sqrt(x.mean(axis=0) ** 2 + x.shape[0]), lambda s: T.inv(moments()[2][0] ** 2),
    lambda s: s * x.shape[0] / (x.shape[0] - 1.5), lambda s: s + 1])
def test_new_values_are_those_of_the_whole_batch(make):
    state = shared([1, 2, 3], 'state')
    updates, new = updates_over_parts({state: T.cast(make(state), 'float32')})
    np.testing.assert_allclose(new[0], evaluate(T.cast(make(state), 'float32'), X, np.float32(1)), rtol=1e-5)
    assert not updates.approximate and new[0].dtype == 'float32'


def test_replicas_do_not_read_the_states():
    """They live on the host; only statistics travel."""
    state = shared(0, 'total')
    updates = BatchUpdates({state: state + x.mean()}, [x])
    assert updates.reductions == ['mean'] and state not in theano.gof.graph.ancestors(updates.statistics)


def test_weights_are_read_where_they_are():
    state = shared(0, 'norm')
    updates, new = updates_over_parts({state: (w ** 2).sum() + x.sum()})
    assert sorted(updates.reductions) == ['first', 'sum']
    np.testing.assert_allclose(new[0], 14 + X.sum(), rtol=1e-5)


def test_rows_and_what_has_no_rule():
    rows, largest = theano.shared(X, name='rows'), shared([0, 0, 0], 'largest')
    updates = BatchUpdates({rows: rows + x, largest: T.maximum(largest, x.max(axis=0))}, [x])
    assert list(updates.rows) == [rows] and list(updates.approximate) == [largest] and updates.reductions == ['mean']


@pytest.mark.parametrize('values,how,weights,expected', [
    ([2, 3], 'sum', [0.75, 0.25], 5), ([2., 4.], 'mean', [0.75, 0.25], 2.5), ([2., 4.], 'mean', [0.5, 0.25], 2),
    ([7, 8], 'first', [1, 1], 7), ([7, 8], 'first', [0, 0], 0), ([2 ** 53, 1], 'sum', [0.75, 0.25], 2 ** 53 + 1),
    ([np.nan], 'mean', [0], 0), ([np.inf, np.nan], 'sum', [0, 0], 0), ([2j, 4j], 'mean', [0.5, 0.5], 3j),
    ([np.float32(1)], 'sum', [1], 1)])
def test_what_a_process_contributes(values, how, weights, expected):
    result = partial([np.array(v) for v in values], how, weights)
    assert result == expected and result.dtype in ('float64', 'int64', 'complex128')
