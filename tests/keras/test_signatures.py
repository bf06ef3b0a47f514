"""Each argument of the methods of `keras.Model` that compute batches: over contexts as in plain Keras."""
import inspect

from theano_mgpu.keras import disable, enable

import keras
import numpy as np
import pytest
from keras.callbacks import LambdaCallback
from support.keras_equivalence import QUICK
from support.keras_zoo import noise

X, Y, W = noise(13, 4), noise(13, 2), np.linspace(.5, 2, 13)


class Batches(keras.utils.Sequence):
    """A sequence of batches of five samples, the last one shorter."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(5 * index, 5 * index + 5)
        return X[rows], Y[rows]


QUEUE = dict(max_queue_size=2, workers=0, use_multiprocessing=False)
LOOP = dict(batch_size=5, verbose=0, callbacks=[LambdaCallback()], steps=None, **QUEUE)
FIT = dict(epochs=2, verbose=0, callbacks=[LambdaCallback()], validation_data=(X, Y), validation_steps=None,
           validation_freq=2, class_weight=None, shuffle=False, initial_epoch=1, steps_per_epoch=None, **QUEUE)
BATCH = dict(x=X, y=Y, sample_weight=W, class_weight=None, reset_metrics=False)
# {method: (arguments of every call, a value for each argument, with which one more call is made)}.
METHODS = {
    'fit': (dict(x=X, y=Y, batch_size=5, verbose=0, shuffle=False),
            dict(FIT, x=X, y=Y, batch_size=4, validation_split=.2, sample_weight=W)),
    'evaluate': (dict(x=X, y=Y, batch_size=5, verbose=0), dict(LOOP, x=X, y=Y, sample_weight=W)),
    'predict': (dict(x=X, batch_size=5), dict(LOOP, x=X)),
    'fit_generator': (dict(generator=Batches(), verbose=0, shuffle=False, workers=0), dict(FIT, generator=Batches())),
    'evaluate_generator': (dict(generator=Batches(), workers=0), dict(
        QUEUE, generator=Batches(), steps=2, callbacks=[LambdaCallback()], verbose=0)),
    'predict_generator': (dict(generator=Batches(), workers=0), dict(
        QUEUE, generator=Batches(), steps=2, callbacks=[LambdaCallback()], verbose=0)),
    'train_on_batch': (dict(x=X, y=Y), BATCH),
    'test_on_batch': (dict(x=X, y=Y), {name: BATCH[name] for name in ('x', 'y', 'sample_weight', 'reset_metrics')}),
    'predict_on_batch': (dict(x=X), dict(x=X)),
}
COMPILE = dict(optimizer='adam', loss='mae', metrics=['mse'], loss_weights=[.5], sample_weight_mode=None,
               weighted_metrics=['mse'], target_tensors=None)


def compiled(**arguments):
    np.random.seed(3)
    model = keras.Sequential([keras.layers.Dense(3, activation='tanh', input_shape=(4,)), keras.layers.Dense(2)])
    model.compile(**dict(dict(optimizer='sgd', loss='mse', metrics=['mae'], mode=QUICK), **arguments))
    return model


def results_of_each(model, name):
    base, arguments = METHODS[name]
    weights = model.get_weights()
    for argument, value in arguments.items():
        model.set_weights(weights)
        model.reset_metrics()
        np.random.seed(5)
        found = getattr(model, name)(**dict(base, **{argument: value}))
        found = found.history if hasattr(found, 'history') else {'result': found}
        yield argument, [np.asarray(found[key], 'float64') for key in sorted(found)] + model.get_weights()


@pytest.fixture
def enabled(cpu2):
    yield lambda: enable(always=True)
    disable()


@pytest.mark.slow_with('fit_generator', 'fit', 'evaluate')
@pytest.mark.parametrize('name', METHODS)
def test_each_argument_of_a_method(name, enabled):
    parameters = set(inspect.signature(getattr(keras.Model, name)).parameters) - {'self', 'kwargs'}
    assert set(METHODS[name][1]) == parameters, 'an argument has no case here'
    expected = list(results_of_each(compiled(), name))
    enabled()
    for (argument, ours), (_, theirs) in zip(results_of_each(compiled(), name), expected):
        assert len(ours) == len(theirs), argument
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=argument)


@pytest.mark.slow
def test_each_argument_of_compile(enabled):
    parameters = set(inspect.signature(keras.Model.compile).parameters) - {'self', 'kwargs'}
    assert set(COMPILE) == parameters, 'an argument has no case here'

    def results():
        for argument, value in COMPILE.items():
            model = compiled(**{argument: value})
            yield [np.ravel(model.train_on_batch(X, Y, sample_weight=W)) for _ in range(2)] + model.get_weights()
    expected = list(results())
    enabled()
    for argument, ours, theirs in zip(COMPILE, results(), expected):
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=argument)
