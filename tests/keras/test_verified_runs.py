"""A run with verification reports equals one without: results, states, random numbers, and output."""
import random

from theano_mgpu.keras import disable, enable, multi_gpu_model, verify

import keras
import numpy as np
import pytest
import theano
import theano.tensor as T
from keras import backend as K
from keras import callbacks
from keras import layers as L
from keras.models import Sequential
from keras.optimizers import SGD
from support.keras_equivalence import floatx, values
from support.keras_zoo import head, noise, one_hot
from support.modes import PYTHON
from support.optimizer_zoo import OPTIMIZERS, Steps, states_of

pytestmark = pytest.mark.filterwarnings('ignore:.*several cores')
X, Y = noise(24, 2, 4), one_hot(24)
FIT = {'batch_size': 8, 'epochs': 2, 'shuffle': True, 'verbose': 0}


@pytest.fixture(autouse=True)
def double():
    with floatx('float64'):
        yield
    disable()


class Unseeded(Steps):
    """An optimizer that draws its seeds from NumPy each time that it is asked for updates, and counts how often."""
    asked = 0

    def steps(self, loss, params, gradients):
        self.asked += 1
        return [.05 * (g + .1 * K.random_normal(K.int_shape(p))) for p, g in zip(params, gradients)]


def with_states():
    """Return a model with a state for each sample, running statistics, random numbers, and a value that is printed."""
    np.random.seed(3)
    return Sequential([
        L.SimpleRNN(4, stateful=True, unroll=True, batch_input_shape=(8, 2, 4)), L.BatchNormalization(), L.Dropout(.3),
        L.Lambda(lambda value: K.print_tensor(value, 'seen'), output_shape=(4,)), head()])


def draw(epoch, logs):
    logs['drawn'] = np.random.rand() + random.random()


def fit(model, optimizer):
    """Fit with a schedule and a validation; return everything that this leaves behind."""
    random.seed(5)
    metrics = ['accuracy', keras.metrics.TopKCategoricalAccuracy(2)]
    model.compile(optimizer, 'categorical_crossentropy', metrics=metrics, mode=PYTHON)
    schedule = [callbacks.LambdaCallback(on_epoch_end=draw)]
    if hasattr(optimizer, 'lr'):
        schedule.append(callbacks.LearningRateScheduler(lambda epoch: .1 / (1 + epoch)))
    history = model.fit(X, Y, callbacks=schedule, validation_data=(X[:8], Y[:8]), **FIT).history
    found = [(name, np.array(each)) for name, each in history.items()] + values(model.weights)
    found += values(states_of(optimizer)) + values([w for metric in model.metrics for w in metric.weights])
    states = [K.get_value(state) for layer in model.layers for state in getattr(layer, 'states', ())]
    return found + [('states', np.array(states)), ('next', np.array([np.random.rand(), random.random()]))]


def assert_same(one, other):
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, value), (_, expected) in zip(one, other):
        np.testing.assert_array_equal(value, expected, name)


@pytest.mark.slow
@pytest.mark.parametrize('make,options', [
    (Unseeded, {'always': True}), (Unseeded, {}),
    (lambda: SGD(.1, momentum=.9), {'always': True})])
def test_fit(make, options, cpu2, capsys):
    """The optimizer was asked again for a report: it drew further seeds. The model's output was printed again."""
    found = []
    for verifies in (False, True):
        report = enable(verify=verifies, tell=lambda text: None, **options)
        optimizer = make()
        found.append(fit(with_states(), optimizer) + [('asked', np.array(getattr(optimizer, 'asked', 0)))])
        told = capsys.readouterr()
        found[-1].append(('printed', np.array(told.out)))
    assert_same([(name.split('_')[0], value) for name, value in found[1]],
                [(name.split('_')[0], value) for name, value in found[0]])
    assert 'seen' in told.out and told.err.count('same answer: ') == 1
    assert not any('verified' in note for note in report.notes)


@pytest.mark.slow
def test_what_only_tests_or_predicts_is_not_trained(cpu2, capsys):
    """A report of a test was one of a training step, which makes the optimizer's state."""
    report = enable(verify=True, always=True)
    model = with_states()
    model.compile(Unseeded(), 'categorical_crossentropy', metrics=['accuracy'], mode=PYTHON)
    before = np.random.get_state()[1].copy()
    model.predict(X[:8], batch_size=8)
    assert 'one prediction on one device' in capsys.readouterr().err
    model.reset_states()
    model.evaluate(X[:8], Y[:8], batch_size=8, verbose=0)
    assert 'one evaluation on one device' in capsys.readouterr().err
    assert model.optimizer.weights == [] and model.optimizer.asked == 0 and model.train_function is None
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    model.train_on_batch(X[:8], Y[:8])
    assert 'one step on one device' in capsys.readouterr().err
    assert report.notes == []


class FailsOnce(theano.Op):
    """An op that passes a value on, but fails with a MemoryError in its first call."""
    __props__ = ()
    calls = 0

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        FailsOnce.calls += 1
        if FailsOnce.calls == 1:
            raise MemoryError('no memory for a report')
        outputs[0][0] = inputs[0].copy()

    def grad(self, inputs, gradients):
        return gradients

    def infer_shape(self, node, shapes):
        return shapes


def model_that_fails_once():
    FailsOnce.calls = 0
    np.random.seed(3)
    model = Sequential([L.Dense(4, input_shape=(6,)), L.Lambda(FailsOnce(), output_shape=(4,)), head()])
    model.compile(SGD(.1), 'categorical_crossentropy', mode=PYTHON)
    return model


def test_a_report_that_fails_ends_no_run(cpu2):
    """A wrapped optimizer, or any error while a report was made, ended the fit."""
    x, y = noise(11, 6), one_hot(11)
    report = enable(verify=True, always=True, tell=lambda text: None)
    model = model_that_fails_once()
    losses = [model.train_on_batch(x, y) for _ in range(3)]
    disable()
    plain = model_that_fails_once()
    FailsOnce.calls = 1
    np.testing.assert_allclose(losses, [plain.train_on_batch(x, y) for _ in range(3)], rtol=1e-9)
    assert [note for note in report.notes if 'cannot be verified: MemoryError' in note]


class ScalarThatFailsOnce(theano.scalar.Identity):
    """An op like FailsOnce, for each element; such an op is divided."""
    calls = 0

    def impl(self, x):
        ScalarThatFailsOnce.calls += 1
        if ScalarThatFailsOnce.calls == 1:
            raise MemoryError('no memory for a report')
        return x


def test_a_report_that_fails_ends_no_call_of_a_function(cpu2):
    told, x = [], T.dmatrix('x')
    passed_on = T.Elemwise(ScalarThatFailsOnce(theano.scalar.same_out, name='passed_on'))
    report = enable(verify=True, always=True, tell=told.append)
    try:
        f = theano.function([x], passed_on(x).sum(axis=1) * 2, mode=PYTHON, name='f')
        for _ in range(2):
            np.testing.assert_array_equal(f(np.ones((5, 3))), np.full(5, 6.))
    finally:
        disable()
    assert len(told) == 1 and 'f cannot be verified: ' in told[0] and 'no memory for a report' in told[0]
    assert 'divided' in str(report)


@pytest.mark.slow_but_with('plain-gradients_replaced')
@pytest.mark.parametrize('name', ['gradients_replaced', 'lookahead', 'mean_loss'])
@pytest.mark.parametrize('kind', ['plain', 'plain, trained', 'parallel'])
def test_verify_by_hand(name, kind, cpu2):
    """A method that is replaced on the instance was verified by comparing plain SGD with itself.

    The report is of the model's own optimizer, which is left as it is.
    """
    x, y = noise(11, 6), one_hot(11)
    found = []
    for verifies in (False, True):
        np.random.seed(3)
        template = Sequential([L.Dense(4, activation='tanh', input_shape=(6,)), L.Dropout(.2), head()])
        optimizer = OPTIMIZERS[name](template)
        model = multi_gpu_model(template) if kind == 'parallel' else template
        model.compile(optimizer, 'categorical_crossentropy', metrics=['accuracy'], mode=PYTHON)
        losses = [model.train_on_batch(x, y)] if kind == 'plain, trained' else []
        if verifies:
            report = verify(model, x, y)
            assert report.passed, str(report)
            new = {row.name: row for row in report.rows if row.kind == 'optimizer'}
            assert len(new) == len(optimizer.weights)
        losses += [model.train_on_batch(x, y) for _ in range(3)]
        found.append([('losses', np.array(losses))] + values(model.weights) + values(states_of(optimizer)))
    for (_, one), (_, other) in zip(*found):
        np.testing.assert_array_equal(one, other)
