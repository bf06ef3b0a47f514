"""Data sets inside of a function, whose rows are its batch: shared variables and constants that no argument brings."""
import theano_mgpu as mgpu
from theano_mgpu.auto.enabled_function import NO_BATCH
from theano_mgpu.devices.transfers import DeviceBuffers

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import data_set_cases
from support.data_set_cases import ANSWERS, CASES, D, N, X, chains, data, differences, process
from support.launch import launch
from support.modes import PYTHON
from support.parameters import slow_but

pytestmark = pytest.mark.usefixtures('interpreted')


@pytest.fixture
def enabled():
    report = mgpu.enable(always=True, tell=lambda text: None)
    yield report
    mgpu.disable()


def step_of(function):
    return function.mgpu_divided.step


def least_squares(name='cost', x=None, y=None):
    """Return the cost, as a function of `w`, of two data sets, and these."""
    x, y = theano.shared(X, 'X') if x is None else x, theano.shared(ANSWERS, 'y') if y is None else y
    w = T.dvector('w')
    return theano.function([w], T.sqr(T.dot(x, w) - y).mean(), name=name), x, y


def expected(w, x, y):
    return np.square(x.get_value().dot(w) - y.get_value()).mean()


@pytest.mark.parametrize('name', list(CASES))
@pytest.mark.parametrize('n', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_data_sets_are_the_batch(name, n, contexts):
    made = contexts('cpu', n)
    difference, usage = differences(CASES[name])
    rows = {'subset': 40, 'masked': data_set_cases.MASK.sum()}.get(name, N)
    assert difference < 1e-12 and list(usage.contexts) == made
    assert (usage.why, usage.calls, usage.samples) == ('divided', 3, 3 * rows)


@pytest.mark.cuda
@pytest.mark.parametrize('name', slow_but(['logistic', 'hierarchical', 'multinomial'], list(CASES)))
def test_rows_of_data_sets_are_the_batch_of_devices(name, gpu2):
    difference, usage = differences(CASES[name], None)
    assert difference < 1e-12 and usage.why == 'divided' and usage.calls == 3


@pytest.mark.mpi
def test_rows_of_data_sets_are_the_batch_of_ranks():
    names = ['logistic', 'logistic_cg', 'mixture', 'hierarchical', 'descent', 'masked']
    done = launch(2, *names, flags='contexts=a->cpu,floatX=float64,cxx=', job=data_set_cases.__file__)
    for name in names:
        rows = int(data_set_cases.MASK.sum()) if name == 'masked' else N
        assert done.stdout.count('%s: alike, %d samples' % (name, 3 * rows)) >= 1, done.stdout + done.stderr


def test_arguments_with_a_batch_come_first(cpu2):
    difference, usage = differences(chains)
    assert difference < 1e-12 and usage.samples == 300


def test_the_reason_names_the_data_sets_and_not_the_parameters(cpu2):
    difference, usage = differences(process)
    assert difference == 0 and not usage.contexts
    assert usage.why.startswith('it cannot be computed in parts by the 61 rows of X, y: Cholesky takes its matrix as a '
                                'whole, and all samples meet there: Cholesky')


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


def test_a_function_divides_data_sets_that_are_named(kind, contexts):
    contexts(kind, 2)
    x, y = data()
    w = theano.shared(np.zeros(D), 'w')
    cost = T.sqr(T.dot(x, w) - y).mean()
    step = mgpu.function([], cost, updates=[(w, w - .1 * T.grad(cost, w))], samples={x: 0, y: 0})
    loss = step()
    np.testing.assert_allclose(loss, np.square(ANSWERS).mean())
    assert step.samples == N and step() < loss and step.verify().passed
    with pytest.raises(mgpu.GraphError, match='samples names .*w.*, which the function updates'):
        mgpu.function([], w.sum(), updates=[(w, w * 2)], samples={w: 0})
