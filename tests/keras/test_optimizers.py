"""Optimizers that use more of the loss than its gradient, and changed ones: as in plain Keras, and verified as such."""
import functools

from theano_mgpu.keras import disable, enable, multi_gpu_model

import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Sequential
from support.keras_equivalence import QUICK, RAGGED, assert_equal, floatx, trained, values
from support.keras_zoo import head, noise, one_hot
from support.optimizer_zoo import OPTIMIZERS, Steps, states_of

DATA = [[noise(sum(RAGGED), 6)], [one_hot(sum(RAGGED))]]


def dense():
    return Sequential([L.Dense(4, activation='tanh', input_shape=(6,), kernel_regularizer='l2'), head()])


def stochastic():
    """Return a model with random numbers, and statistics of the batch."""
    return Sequential([L.Dense(4, input_shape=(6,), use_bias=False), L.BatchNormalization(), L.Activation('tanh'),
                       L.Dropout(.3), head()])


def everything(make, build, parallel=False, mode=QUICK):
    """Train a model; return the losses, weights, states of the optimizer, and the model."""
    np.random.seed(11)
    template = build()
    made = make(template)
    model = multi_gpu_model(template) if parallel else template
    model.compile(made, 'categorical_crossentropy', metrics=['accuracy'], mode=mode)
    history = [('step %d' % i, results) for i, results in enumerate(trained(model, DATA))]
    return history + values(model.weights) + values(states_of(made)), model


@pytest.fixture(autouse=True)
def double():
    with floatx('float64'):
        yield


@pytest.fixture
def enabled():
    """Return a function that enables all contexts; notes go to its report only."""
    yield lambda **options: enable(always=True, tell=lambda text: None, **options)
    disable()


@functools.lru_cache(None)
def plain(name, build):
    """Return the results of plain Keras, computed once; call this before anything is enabled."""
    return everything(OPTIMIZERS[name], build)[0]


QUICK_ONES = 'polyak', 'mean_loss', 'curvature', 'lookahead', 'gradients_replaced'


def slow_but(*names):
    return pytest.mark.parametrize('name', [name if name in names else pytest.param(name, marks=pytest.mark.slow)
                                            for name in OPTIMIZERS])


@pytest.mark.slow_but_with('gradients_replaced-dense')
@pytest.mark.parametrize('build', [dense, stochastic])
@slow_but(*QUICK_ONES)
def test_enabled(name, build, contexts, enabled, capsys):
    """A step that depends on the loss's value, or its derivatives, silently became another one on several contexts.

    The report is about this very optimizer, and the run is the same with it.
    """
    contexts('cpu', 2)
    expected = plain(name, build)
    report = enabled(verify=True)
    found, model = everything(OPTIMIZERS[name], build)
    assert_equal(found, expected, 1e-9)
    assert report.notes == [] and model.train_function.function.refused is None
    told = capsys.readouterr()
    assert told.err.count('same answer: ') == 1 and 'NOT' not in told.err and told.out == ''


@slow_but('sharpness')
def test_parallel_model(name, contexts):
    contexts('cpu', 2)
    expected = plain(name, dense)
    found, model = everything(OPTIMIZERS[name], dense, parallel=True)
    assert_equal(found, expected, 1e-9)
    assert len(model.train_function.function.contexts) == 2


@pytest.mark.slow_with('lookahead')
@pytest.mark.parametrize('name', ['lookahead', 'mean_loss'])
def test_a_parallel_model_continues_with_the_states_of_its_template(name, cpu2):
    """States that are not among the optimizer's weights began anew; a wrapper's own lists named other variables."""
    found = []
    for parallel in (False, True):
        np.random.seed(11)
        model = dense()
        made = OPTIMIZERS[name](model)
        model.compile(made, 'categorical_crossentropy', mode=QUICK)
        first = trained(model, DATA, (7, 5))
        if parallel:
            model = multi_gpu_model(model)
        found.append([('', each) for each in first + trained(model, DATA)] + values(model.weights) + values(
            states_of(made)))
    assert_equal(*found, 1e-9)


class Reshaping(Steps):
    def steps(self, loss, params, gradients):
        scales = np.arange(1, 9).reshape((8, 1)) / 10
        rows = [K.reshape(g, (8, -1)) * scales if K.ndim(g) == 2 else g for g in gradients]
        return [.1 * (K.reshape(r, K.int_shape(p)) + K.random_normal(K.int_shape(p), seed=5 + i))
                for i, (r, p) in enumerate(zip(rows, params))]


def test_a_size_of_a_weight_is_no_length_of_a_batch(cpu2):
    """Batches of 8 are written into the model; a weight has 8 columns, too, as the optimizer knows."""
    found = []
    for parallel in (False, True):
        np.random.seed(11)
        model = Sequential([L.Dense(8, batch_input_shape=(8, 6)), L.Lambda(
            lambda value: K.tanh(K.reshape(value, (8, 2, 4))), output_shape=(2, 4)), L.Flatten(), head()])
        model = multi_gpu_model(model) if parallel else model
        model.compile(Reshaping(), 'categorical_crossentropy', mode=QUICK)
        found.append([('', each) for each in trained(model, DATA, (8, 8))] + values(model.weights))
    assert_equal(*found, 1e-9)
    assert len(model.train_function.function.contexts) == 2 and not model.train_function.function.refused


@slow_but()
def test_on_devices(name, contexts, enabled):
    expected = plain(name, dense)
    contexts('gpu', 2)
    enabled()
    found, model = everything(OPTIMIZERS[name], dense, mode=None)
    assert_equal(found, expected, 1e-9)
    assert len(model.train_function.function.contexts) == 2
