"""The next batch is sliced and sent while one is computed: which one it is, and that nothing else changes."""
import threading

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model
from theano_mgpu.keras.hooks import keras_loops
from theano_mgpu.keras.hooks.prefetch import next_rows
from theano_mgpu.runtime.batches.prefetch import LookAhead

import keras
import numpy as np
import pytest

X = np.random.RandomState(0).rand(50, 6).astype('float32')
Y = np.eye(3, dtype='float32')[np.arange(50) % 3]


class Batches(keras.utils.Sequence):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(13 * index, 13 * index + 13)
        return X[rows], Y[rows]


def generator(with_weights=False):
    while True:
        for x, y in Batches():
            yield (x, y, np.arange(len(x), dtype='float32')) if with_weights else (x, y)


def model_of(contexts, ahead, monkeypatch, small=False):
    """Return a parallel model, and the list of batches that were sent ahead, one entry a batch."""
    np.random.seed(5)
    if small:
        parallel = multi_gpu_model(keras.Sequential([keras.layers.Dense(3, activation='tanh', input_shape=(6,))]))
        parallel.compile('sgd', 'mse')
    else:
        model = keras.Sequential([keras.layers.Dense(5, activation='tanh', input_shape=(6,)),
                                  keras.layers.Dropout(.3, seed=3), keras.layers.Dense(3, activation='softmax')])
        parallel = multi_gpu_model(model)
        parallel.compile(keras.optimizers.Adam(0.01), 'categorical_crossentropy', metrics=['accuracy'])
    if not ahead:
        monkeypatch.setattr(LookAhead, 'prepare', lambda self: None)
    sent, take = [], LookAhead.take

    def note(self, *args):
        found = take(self, *args)
        if self is parallel.train_function.function.look_ahead:
            sent.append(found is not None)
        return found
    monkeypatch.setattr(LookAhead, 'take', note)
    return parallel, sent


class TrainsInBetween(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        self.model.train_on_batch(X[:5], Y[:5])


LOOPS = {
    'fit': lambda model: model.fit(X, Y, batch_size=16, epochs=2, verbose=0, validation_split=0.2),
    'fit in batch order': lambda model: model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle='batch'),
    'fit with weights': lambda model: model.fit(X, Y, batch_size=16, epochs=2, verbose=0, sample_weight=np.arange(50.),
                                                class_weight={0: 1, 1: 2, 2: 3}),
    'generator': lambda model: model.fit_generator(generator(), 4, epochs=2, verbose=0, class_weight={0: 1, 1: 2, 2: 3},
                                                   validation_data=(X, Y)),
    'generator with weights': lambda model: model.fit_generator(generator(True), 4, epochs=2, verbose=0),
    'sequence': lambda model: model.fit_generator(Batches(), epochs=2, verbose=0, shuffle=False, workers=2),
    'generator on this thread': lambda model: model.fit_generator(generator(), 4, epochs=2, verbose=0, workers=0),
}


@pytest.mark.slow
@pytest.mark.parametrize('loop', LOOPS)
def test_the_same_with_and_without(gpu2, monkeypatch, loop):
    found = []
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            model, sent = model_of(gpu2, ahead, patch)
            np.random.seed(7)
            history = LOOPS[loop](model).history
            found.append((history, model.get_weights(), model.optimizer.get_weights()))
            assert keras_loops.running.batches is None
            if not ahead or loop == 'generator on this thread':
                assert not any(sent)
            elif loop.startswith('fit'):  # all but the first batch of each epoch
                assert sent == ([False] + [True] * (len(sent) // 2 - 1)) * 2
    assert found[0][0] == found[1][0]
    for ones, others in zip(found[0][1:], found[1][1:]):
        for one, other in zip(ones, others):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_batches_of_a_generator_are_sent_ahead_once_they_are_there(gpu2, monkeypatch):
    model, sent = model_of(gpu2, True, monkeypatch)
    model.fit_generator(generator(), 12, epochs=2, verbose=0)
    assert sum(sent) > 4


@pytest.mark.usefixtures('interpreted')
def test_nothing_is_sent_ahead_to_the_host(cpu2, monkeypatch):
    model, sent = model_of(cpu2, True, monkeypatch)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    assert not any(sent)


@pytest.mark.slow
def test_a_callback_that_trains_in_between_breaks_nothing(gpu2, monkeypatch):
    """The callback's batch is not the one that was sent ahead: that one is left, and the callback's is computed."""
    found = []
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            model, _ = model_of(gpu2, ahead, patch, small=True)
            model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=[TrainsInBetween()])
            found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


class EditsTheData(keras.callbacks.Callback):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def on_batch_end(self, batch, logs=None):
        self.x *= np.float32(1.1)


def test_a_callback_that_edits_the_data_is_seen_by_the_next_batch(gpu2, monkeypatch):
    """The batch was sent already, as it was before."""
    found = []
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            model, sent = model_of(gpu2, ahead, patch, small=True)
            x = X.copy()
            model.fit(x, Y, batch_size=16, epochs=1, verbose=0, shuffle=False, callbacks=[EditsTheData(x)])
            found.append(model.get_weights())
            model.fit(x, Y, batch_size=16, epochs=1, verbose=0, callbacks=[keras.callbacks.History()])
            assert any(sent) == ahead  # Keras's own callbacks edit nothing
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


class EvaluatesInBetween(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_batch_end(self, batch, logs=None):
        self.found.append(self.model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0))


@pytest.mark.slow
def test_a_callback_that_evaluates_in_between_gets_its_own_rows(gpu2, monkeypatch):
    found = []
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            model, _ = model_of(gpu2, ahead, patch, small=True)
            callback = EvaluatesInBetween()
            model.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
            found.append((callback.found, model.get_weights()))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1]):
        np.testing.assert_array_equal(one, other)


def test_a_thread_that_predicts_is_no_part_of_the_loop(cpu2, monkeypatch):
    """A prediction in a generator's thread took the class weights from the next batch of the loop."""
    model, _ = model_of(cpu2, True, monkeypatch, small=True)
    seen = []

    def in_a_thread(batch, logs):
        thread = threading.Thread(target=lambda: (model.predict(X), seen.append(vars(keras_loops.running))))
        weights = keras_loops.running.batches._class_weight
        thread.start()
        thread.join()
        assert weights and keras_loops.running.batches._class_weight is weights
    in_a_thread.__module__ = 'keras.callbacks'  # one of the user's may edit the data: no batch is known ahead then
    model.fit_generator(generator(), 2, verbose=0, class_weight={0: 1, 1: 2, 2: 3}, callbacks=[
        keras.callbacks.LambdaCallback(on_batch_end=in_a_thread)])
    assert seen == [{}, {}]


def test_next_rows():
    order = np.array([3, 1, 2, 0, 4])
    assert next_rows(order[0:2]).tolist() == [2, 0] and next_rows(order[2:4]).tolist() == [4]
    assert next_rows(order[4:5]) is None and next_rows(order.copy()) is None and next_rows([1, 2]) is None


def test_the_mends_of_keras_are_there():
    import keras.engine.training_arrays as training_arrays
    from keras.utils import data_utils
    assert hasattr(training_arrays.slice_arrays, '__wrapped__')
    assert all(hasattr(cls.get, '__wrapped__') for cls in (data_utils.OrderedEnqueuer, data_utils.GeneratorEnqueuer))
    assert mgpu.__version__
