"""Data sets inside of a function, whose rows are its batch: shared variables and constants that no argument brings."""
import re
import time

import theano_mgpu as mgpu
from theano_mgpu.auto.data_sets import DataSets
from theano_mgpu.auto.found import NO_BATCH
from theano_mgpu.devices.transfers import DeviceBuffers

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import data_set_cases
from support.data_set_cases import ANSWERS, CASES, REFUSED, D, N, X, chains, data, differences
from support.launch import launch
from support.modes import PYTHON
from support.parameters import slow_but
from theano.compile.ops import as_op
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import inputs as inputs_of
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

# The rows of cases, if not N.
ROWS = {'subset': 40, 'sparse_subset': 40, 'masked': int(data_set_cases.MASK.sum()), 'series': N - 1,
        'sampler': data_set_cases.CHAINS}

pytestmark = pytest.mark.usefixtures('interpreted')


@pytest.fixture
def enabled():
    report = mgpu.enable(always=True, tell=lambda text: None)
    yield report
    mgpu.disable()


def step_of(function):
    return function.mgpu_divided.source.step


def least_squares(name='cost', x=None, y=None):
    """Return the cost, as a function of `w`, of two data sets, and these."""
    x, y = theano.shared(X, 'X') if x is None else x, theano.shared(ANSWERS, 'y') if y is None else y
    w = T.dvector('w')
    return theano.function([w], T.sqr(T.dot(x, w) - y).mean(), name=name), x, y


def expected(w, x, y):
    return np.square(x.get_value().dot(w) - y.get_value()).mean()


@pytest.mark.slow_with('2-masked', '2-series', '2-standardised', '2-sampler', '2-logistic', '2-kernel', '2-scanned',
                       '2-newton')
@pytest.mark.parametrize('name', list(CASES))
@pytest.mark.parametrize('n', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_data_sets_are_the_batch(name, n, contexts):
    made = contexts('cpu', n)
    difference, usage = differences(CASES[name])
    rows = ROWS.get(name, N)
    assert difference < 1e-12 and list(usage.contexts) == made
    assert (usage.why, usage.calls, usage.samples) == ('divided', 3, 3 * rows)


@pytest.mark.cuda(opencl='slow')
@pytest.mark.parametrize('name', slow_but(['logistic', 'hierarchical', 'multinomial'], list(CASES)))
def test_rows_of_data_sets_are_the_batch_of_devices(name, gpu2):
    difference, usage = differences(CASES[name], None)
    assert difference < 1e-12 and usage.why == 'divided' and usage.calls == 3


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('names', [['logistic_cg', 'mixture', 'hierarchical', 'descent', 'masked', 'kernel'],
                                   list(CASES)], ids=['some', 'all'])
def test_rows_of_data_sets_are_the_batch_of_ranks(names):
    done = launch(2, *names, flags='contexts=a->cpu,floatX=float64,cxx=', job=data_set_cases.__file__)
    for name in names:
        text = '%s: alike, %d samples' % (name, 3 * ROWS.get(name, N))
        assert text in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize('n', [40, 100])  # of less memory than the data sets, and of more
def test_arguments_with_a_batch_come_first(n, cpu2, monkeypatch):
    monkeypatch.setattr(data_set_cases, 'CHAINS', n)
    difference, usage = differences(chains)
    assert difference < 1e-12 and usage.samples == 3 * n


def test_indices_are_a_batch_and_no_parameters(cpu2, enabled):
    """The gradient of weights that no function updates has their rows."""
    i, words, weights = T.lvector('i'), theano.shared(np.ones((40, 3)), 'words'), theano.shared(np.ones((64, 3)), 'w')
    cost = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(words[i], weights.T)), i).mean()
    f = theano.function([i], [cost, T.grad(cost, weights)], mode=PYTHON)
    np.testing.assert_allclose(f(np.arange(20))[0], np.log(64))
    assert enabled.usages[0].samples == 20


def test_parameters_of_more_memory_than_the_data_come_first(cpu2, enabled):
    y, theta = data()[1], T.dvector('theta')
    f = theano.function([theta], T.sqr((theta.dimshuffle(0, 'x') * y).sum(axis=0)).sum(), mode=PYTHON)
    np.testing.assert_allclose(f(np.ones(300)), np.square(300 * ANSWERS).sum(), rtol=1e-12)
    assert enabled.usages[0].samples == 300


def test_data_sets_without_rows_leave_a_call_to_one_device(cpu2, enabled):
    f, x, y = least_squares()
    for n in (N, 0, N):
        x.set_value(X[:n])
        y.set_value(ANSWERS[:n])
        with np.errstate(invalid='ignore'):
            np.testing.assert_allclose(f(np.ones(D)), np.square(X[:n].sum(axis=1) - ANSWERS[:n]).sum() / (n or np.nan))
    assert enabled.usages[0].samples == 2 * N


@pytest.mark.parametrize('make', list(REFUSED))
def test_the_reason_names_the_data_sets_and_not_the_parameters(make, cpu2):
    difference, usage = differences(make)
    assert difference == 0 and not usage.contexts
    assert re.match('it cannot be computed in parts by the 61 rows of ' + REFUSED[make], usage.why)


def ways(output, *values, updated=(), **options):
    """Return the rows and the names of the ways to take data sets for the batch of a graph."""
    inputs = [v for v in inputs_of([output]) if not isinstance(v, (theano.Constant, SharedVariable))]
    found = DataSets(inputs, [output], dict.fromkeys(updated, output)).ways(values, **options)
    return [(way.length, sorted(map(str, way.key))) for way in found]


def test_data_sets_are_variables_whose_rows_meet_nothing_else():
    (x, y), v, m = data(), T.dvector(), T.dmatrix()
    table, layer = theano.shared(np.ones((30, 20)), 'table'), theano.shared(np.ones((64, 3)), 'layer')
    both = T.sqr(x).sum() + y.sum() + v.sum()
    assert ways(both, np.ones(4)) == [(N, ['X', 'y'])] and not ways(both, np.ones(N))    # an argument has as many
    assert not ways(both, np.ones(4), updated=[theano.shared(np.ones(N))])               # or a weight
    columns = both + T.sqr(table).sum() + theano.shared(np.ones(20), 'bias').sum()       # or the columns of another
    assert ways(columns, np.ones(4)) == [(30, ['table']), (N, ['X', 'y'])]
    assert not ways(T.sqr(x).sum() + m.sum(), np.ones((1, 7))) and ways(T.sqr(x).sum() + m.sum(), np.ones((2, 7)))
    product = T.dot(T.outer(v, v).flatten(), layer)
    assert not ways(product, np.ones(8)) and ways(product + T.sqr(layer).sum(), np.ones(8)) == [(64, ['layer'])]
    assert not ways(theano.shared(np.ones(15)).sum()) and not ways(T.constant(np.arange(40)).sum())
    assert not ways(MRG_RandomStreams(1).uniform((40,)).sum())


def test_expressions_of_data_are_data_sets():
    x, v = data()[0], T.dvector()
    now = as_op([T.dmatrix], [T.dmatrix])(lambda values: values + time.time())
    assert ways(T.dot(x[20:], v), np.ones(D), of_expressions=True) == [(N - 20, ['Subtensor{int64::}.0'])]
    assert ways(T.dot(now(x)[20:], v), np.ones(D), of_expressions=True) == [(N, ['X'])]


def test_an_expression_is_computed_once_where_its_samples_meet(cpu2, enabled):
    x, w = data()[0], T.dvector('w')
    f = theano.function([w], T.sqr(T.dot((x - x.mean(axis=0)) / x.std(axis=0), w)).mean(), mode=PYTHON)
    f(np.ones(D))
    assert len(step_of(f).plan.program.stages) == 1 and not step_of(f).inputs.data.keys() & {x}


def test_a_function_without_arguments_is_left_to_plain_theano_once_its_data_are_refused(cpu2, enabled):
    f = theano.function([], T.sort(data()[0][:, 0])[3] + theano.shared(1.), mode=PYTHON)
    f()
    assert f.mgpu_divided is None


def test_a_function_without_arguments_is_no_error_if_its_data_are_refused(cpu2):
    told = []
    report = mgpu.enable(always=True, strict=True, tell=told.append)
    f = theano.function([], T.sort(data()[0][:, 0])[3], mode=PYTHON)
    mgpu.disable()
    assert f() == np.sort(X[:, 0])[3] and not told and 'by the 61 rows of X' in report.usages[0].why


def test_calls_of_a_function_without_arguments_may_grow(cpu2):
    mgpu.enable(tell=lambda text: None)
    f = theano.function([], T.sqr(data()[0]).sum(), mode=PYTHON)
    mgpu.disable()
    for _ in range(20):
        f()
    assert f.mgpu_divided is not None  # its data may be set to more rows


def test_weights_are_no_chains(cpu2, enabled):
    """Numbers are drawn, too, where they have dropout; a sum over the rows of weights is no work for replicas."""
    x, w, streams = theano.shared(X[:7], 'x'), theano.shared(np.ones((20, D)), 'w'), RandomStreams(3)
    cost = T.sqr(T.dot(x * streams.binomial(x.shape), w.T)).mean()
    f = theano.function([], cost, updates=[(w, w - T.grad(cost, w) / T.sqr(w).sum())], mode=PYTHON)
    f()
    assert f.mgpu_divided is None or step_of(f) is None


def test_weights_are_no_data_set(cpu2, enabled):
    """An embedding that a function updates has many rows, and so has a matrix whose rows meet an argument's columns."""
    words = theano.shared(np.ones((1000, 4)), 'words')
    picked = words[T.lvector('indices')]
    indices = picked.owner.inputs[1]
    theano.function([indices], picked.sum(), updates=[(words, words * .9)], mode=PYTHON, name='train')
    size = theano.function([], T.sqr(words).sum(), mode=PYTHON, name='size')
    assert size() == 4000
    x, w, v = T.drow('x'), theano.shared(np.ones((30, 20)), 'w'), theano.shared(np.ones((20, 2)), 'v')
    predict = theano.function([x], T.dot(T.dot(x, w), v), mode=PYTHON, name='predict')
    predict(np.ones((1, 30)))
    _, of_size, of_predict = enabled.usages
    assert of_size.why == NO_BATCH and not of_predict.contexts


def test_a_new_value_counts_whatever_its_number_of_rows(kind, contexts, enabled):
    contexts(kind, 2)
    f, x, y = least_squares()
    w = np.arange(D) / 2
    for rows in (N, 40, 90):
        x.set_value(np.random.RandomState(rows).randn(rows, D))
        y.set_value(np.random.RandomState(1).randn(rows))
        np.testing.assert_allclose(f(w), expected(w, x, y), rtol=1e-12)
    assert enabled.usages[0].samples == N + 40 + 90
    y.set_value(ANSWERS[:3])
    with pytest.raises(ValueError, match='mis-?match|could not be broadcast'):
        f(w)


def test_an_edit_of_borrowed_memory_counts(kind, contexts, enabled):
    contexts(kind, 2)
    memory = X.copy()
    f, x, y = least_squares(x=theano.shared(memory, 'X', borrow=True))
    w = np.ones(D)
    for _ in range(3):
        np.testing.assert_allclose(f(w), expected(w, x, y), rtol=1e-12)
        memory[50:] += 1


@pytest.mark.cuda
def test_memory_that_is_borrowed_later_cannot_be_edited(gpu2, enabled):
    f, x, y = least_squares()
    f(np.ones(D))
    assert not x.get_value(borrow=True).flags.writeable


def test_an_edit_of_borrowed_memory_counts_for_a_subset(cpu2, enabled):
    memory = X.copy()
    x, w = theano.shared(memory, 'X', borrow=True), T.dvector('w')
    f = theano.function([w], T.sqr(T.dot(x[20:], w)).sum(), mode=PYTHON)
    for _ in range(3):
        np.testing.assert_allclose(f(np.ones(D)), np.square(memory[20:].sum(axis=1)).sum(), rtol=1e-12)
        memory[50:] += 1
    x.set_value(X[:50])
    np.testing.assert_allclose(f(np.ones(D)), np.square(X[20:50].sum(axis=1)).sum(), rtol=1e-12)
    assert enabled.usages[0].samples == 3 * (N - 20) + 30


@pytest.mark.slow_with('gpu')
def test_a_data_set_that_a_function_updates_later_has_its_new_value(kind, contexts, enabled):
    contexts(kind, 2)
    f, x, y = least_squares()
    w = np.ones(D)
    f(w)
    double = theano.function([], [], updates=[(x, x * 2)], name='double')
    for _ in range(2):
        double()
        np.testing.assert_allclose(f(w), expected(w, x, y), rtol=1e-12)


@pytest.mark.cuda
def test_each_device_gets_its_rows_once(gpu2, enabled, monkeypatch):
    sent, send = [], DeviceBuffers.send

    def note(self, key, value):
        if isinstance(value, np.ndarray):
            sent.append(value.shape)
        return send(self, key, value)
    monkeypatch.setattr(DeviceBuffers, 'send', note)
    f, x, y = least_squares()
    for _ in range(3):
        f(np.ones(D))
    assert [sent.count(shape) for shape in ((30, D), (31, D), (30,), (31,))] == [1] * 4
    assert not step_of(f).built.executable.variables  # there is no copy of the whole
    x.set_value(X + 1)
    f(np.ones(D))
    assert [sent.count(shape) for shape in ((30, D), (31, D), (30,), (31,))] == [2, 2, 1, 1]


@pytest.mark.cuda
def test_where_rows_do_not_fit_slices_are_sent(gpu2, enabled):
    f, x, y = least_squares()
    f(np.ones(D))
    step = step_of(f)
    step.built.splitter.slice([N], 4)
    np.testing.assert_allclose(f(np.ones(D)), expected(np.ones(D), x, y), rtol=1e-12)
    data_set, = [each for variable, each in step.inputs.data.items() if variable is x]
    assert len(data_set._parts) == 8 and not any(rows._on for rows in data_set._parts)


@pytest.mark.slow_with('gpu')
def test_a_function_divides_data_sets_that_are_named(kind, contexts):
    contexts(kind, 2)
    x, y = data()
    w = theano.shared(np.zeros(D), 'w')
    cost = T.sqr(T.dot(x, w) - y).mean()
    step = mgpu.function([], cost, updates=[(w, w - .1 * T.grad(cost, w))], samples={x: 0, y: 0})
    loss = step()
    np.testing.assert_allclose(loss, np.square(ANSWERS).mean())
    assert step.samples == N and step() < loss and step.verify().passed
    before = w.get_value()
    double = mgpu.function([], w.sum(), updates=[(w, w * 2)], samples={w: 0})  # a state that is the batch
    assert double() == pytest.approx(before.sum()) and double.samples == D
    np.testing.assert_array_equal(w.get_value(), before * 2)
