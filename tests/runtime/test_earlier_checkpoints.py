"""Files of checkpoints that an earlier version has written: each of the three kinds is continued from."""
import os
import shutil

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON

FILES = os.path.join(os.path.dirname(__file__), os.pardir, 'support', 'earlier_checkpoints')


@pytest.fixture
def earlier(tmp_path, cpu2):
    """Return a function that copies a file of a name, and returns the path of the copy in a folder of its own."""
    def copied(name):
        shutil.copy(os.path.join(FILES, name), str(tmp_path / name))
        return str(tmp_path / name)
    return copied


def steps(path):
    """Train, and return the steps that were completed before, and the variable after three."""
    x, w = T.dvector('x'), theano.shared(1., 'w')
    step = mgpu.training_function([x], (x * w).mean(), [w], lambda gradients: {w: 2 * w + gradients[0]},
                                  mode='FAST_COMPILE')
    begin = step.checkpoint(path, every=2)
    for i in range(begin, 3):
        step(np.ones(4) * i)
    return begin, float(w.get_value())


def loop(folder, n_calls=6):
    """Run a loop that draws numbers, and in which a call fails; return whether the first call was replayed, and all
    results."""
    x, w = T.dvector('x'), theano.shared(1., 'w')
    step = theano.function([x], x * w, updates={w: w + x.sum()}, mode='FAST_COMPILE')
    ask = theano.function([x], {'sum': x.sum() * w, 'both': T.stack([x[0], w])}, mode='FAST_COMPILE')
    np.random.seed(3)
    checkpoint = mgpu.Checkpoint(folder, [step, ask], every=2)
    began, results = checkpoint.replaying, []
    for _ in range(n_calls):
        results += [step(np.random.rand(3)).tolist(), {name: v.tolist() for name, v in ask(np.random.rand(2)).items()}]
        try:
            ask(np.zeros((2, 2)))
        except TypeError as error:
            results.append(type(error).__name__)
    assert checkpoint.completed == n_calls
    return began, results + [float(w.get_value()), np.random.rand()]


def fit(path, killed_at=0):
    """Fit a model, or interrupt the fit at a batch; return the computed batches, the history and the weights."""
    from theano_mgpu.keras import Checkpoint, multi_gpu_model

    from keras.callbacks import LambdaCallback, ReduceLROnPlateau
    from keras.layers import Dense
    from keras.models import Sequential
    np.random.seed(1)
    model = multi_gpu_model(Sequential([Dense(4, activation='tanh', input_shape=(3,)), Dense(1)]), gpus=None)
    model.compile('adam', 'mse', metrics=['mae'], mode=PYTHON)
    x, computed = np.random.RandomState(0).randn(22, 3).astype('float32'), []

    def count(batch, logs):
        computed.append(batch)
        if len(computed) == killed_at:
            raise KeyboardInterrupt
    callbacks = [ReduceLROnPlateau('loss', patience=1, min_delta=1000), LambdaCallback(on_batch_end=count)]
    callbacks += [Checkpoint(path, every=2)] * (path is not None)
    history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=6, epochs=4, validation_split=.2, verbose=0,
                        callbacks=callbacks).history
    return len(computed), history, model.get_weights()


def test_steps(earlier):
    (found, w), (begin, expected) = steps(earlier('steps.npz')), steps(earlier('steps.npz') + '.new')
    assert (found, w) == (2, expected) and begin == 0


def test_a_loop(earlier, tmp_path):
    (replayed, found), (began, expected) = loop(os.path.dirname(earlier('checkpoint.npz'))), loop(str(tmp_path / 'new'))
    assert replayed and not began and found == expected


def test_a_fit(earlier):
    (n_batches, history, weights), (n_all, expected, expected_weights) = fit(earlier('fit.npz')), fit(None)
    assert (n_batches, n_all) == (12 - 7, 12)
    assert history.keys() == expected.keys() and 'lr' in history
    for found, other in zip([*weights, *history.values()], [*expected_weights, *expected.values()]):
        np.testing.assert_allclose(found, other, rtol=1e-3, atol=1e-5)
