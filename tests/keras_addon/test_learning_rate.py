"""LearningRateWarmup: the learning rate in each batch, and its effect on momentum."""
from theano_mgpu.keras import Checkpoint, LearningRateWarmup, multi_gpu_model

import keras
import numpy as np
import pytest
from keras import backend as K
from keras.callbacks import LambdaCallback
from support.keras_equivalence import QUICK

X = np.random.RandomState(0).randn(40, 3).astype('float32')
Y = X.sum(axis=1, keepdims=True)


def compiled(contexts, momentum=0.0, kind='cpu', optimizer=None):
    contexts(kind, 2)
    template = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer='zeros', input_shape=(3,))])
    model = multi_gpu_model(template)
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=momentum), 'mse',
                  mode=QUICK if kind == 'cpu' else None)
    return model


def fitted(model, *callbacks, **options):
    """Fit a model; return the learning rate in each batch."""
    rates = []
    note = LambdaCallback(on_batch_begin=lambda batch, logs: rates.append(float(K.get_value(model.optimizer.lr))))
    model.fit(X, Y, callbacks=list(callbacks) + [note], **dict({'batch_size': 10, 'verbose': 0, 'shuffle': False},
                                                              **options))
    return rates


def test_it_grows_from_batch_to_batch_to_the_multiple(contexts, capsys):
    model = compiled(contexts)
    warmup = LearningRateWarmup(5, epochs=2, verbose=1)
    rates = fitted(model, warmup, epochs=3)
    np.testing.assert_allclose(rates, [0.01 * (1 + 4 * min(1, t / 8)) for t in range(12)], rtol=1e-6)
    assert capsys.readouterr().out.splitlines() == ['epoch 1: learning rate 0.025', 'epoch 2: learning rate 0.045']
    K.set_value(model.optimizer.lr, 0.002)  # afterwards it is the user's
    assert fitted(model, warmup, epochs=5, initial_epoch=3) == pytest.approx([0.002] * 8)
    assert fitted(model, warmup, epochs=1)[0] == pytest.approx(0.01)  # a training from the beginning


def velocity_without_learning_rate(momentum, rates):
    """Return the weights of SGD whose velocity does not contain the learning rate: equation 9 of the paper."""
    weights, velocity = np.zeros((3, 1)), np.zeros((3, 1))
    for t, rate in enumerate(rates):
        x, y = X[t % 4 * 10:][:10].astype('float64'), Y[t % 4 * 10:][:10].astype('float64')
        velocity = momentum * velocity + 2 * x.T.dot(x.dot(weights) - y) / len(x)
        weights = weights - rate * velocity
    return weights


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_the_velocity_grows_with_it(contexts, kind):
    model = compiled(contexts, 0.9, kind)
    rates = fitted(model, LearningRateWarmup(8, epochs=2), epochs=2)
    np.testing.assert_allclose(model.get_weights()[0], velocity_without_learning_rate(0.9, rates), atol=1e-5)
    assert K.get_value(model.optimizer.momentum) == pytest.approx(0.9)


def test_without_the_correction_it_lags_behind(contexts):
    model = compiled(contexts, 0.9)
    rates = fitted(model, LearningRateWarmup(8, epochs=2, momentum_correction=False), epochs=2)
    assert np.abs(model.get_weights()[0] - velocity_without_learning_rate(0.9, rates)).max() > 0.01


def test_an_interrupted_fit_leaves_the_momentum(contexts):
    model, warmup = compiled(contexts, 0.9), LearningRateWarmup(8, epochs=2)

    def stop(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        fitted(model, warmup, LambdaCallback(on_batch_begin=stop))
    fitted(model, warmup, epochs=2)
    assert K.get_value(model.optimizer.momentum) == pytest.approx(0.9)


@pytest.mark.parametrize('killed_in', [(0, 3), (1, 1), (2, 0)], ids=str)
def test_a_fit_that_is_resumed_has_the_same_rates_and_bits(contexts, tmp_path, killed_in):
    """The rates also agree if the fit was killed in the last batch in which the rate grew."""
    def run(path, stop=None):
        epochs = []

        def kill(batch, logs):
            if (len(epochs) - 1, batch) == stop:
                raise KeyboardInterrupt
        model = compiled(contexts, 0.9)
        killer = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch), on_batch_begin=kill)
        fitted(model, Checkpoint(str(path), every=1), LearningRateWarmup(4, epochs=1), killer, epochs=3)
        return model.get_weights() + [K.get_value(w) for w in model.optimizer.weights]
    expected = run(tmp_path / 'whole.npz')
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'run.npz', stop=killed_in)
    for one, other in zip(expected, run(tmp_path / 'run.npz')):
        np.testing.assert_array_equal(other, one)


def test_what_is_refused(contexts):
    for options in ({'factor': 0}, {'factor': 2, 'epochs': 0}):
        with pytest.raises(ValueError, match='have to be positive'):
            LearningRateWarmup(**options)

    class WithoutRate(keras.optimizers.Optimizer):
        def get_updates(self, loss, params):
            return [(param, param - 0.1 * gradient) for param, gradient in zip(params, K.gradients(loss, params))]
    with pytest.raises(ValueError, match='WithoutRate has no learning rate'):
        fitted(compiled(contexts, optimizer=WithoutRate()), LearningRateWarmup(2))
