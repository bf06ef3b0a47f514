"""Bugs that were found and fixed, each under its symptom: access to a Keras model's own functions by scripts.

A script runs in plain Keras, with models that `enable` leaves to plain Keras, as it does on contexts of the CPU, and
with models whose batches are divided. All have to leave the same behind.
"""
import io
import pickle

import theano_mgpu as mgpu
from theano_mgpu.auto import divided_model
from theano_mgpu.auto.model_function import ModelFunction
from theano_mgpu.keras import Checkpoint, disable, enable, multi_gpu_model

import h5py
import keras
import numpy as np
import pytest
import theano
from keras import layers as L
from keras.models import Model, Sequential, load_model
from support.keras_zoo import Unlisted, noise, one_hot

pytestmark = pytest.mark.verified
X, Y = noise(23, 6).astype('float32'), one_hot(23).astype('float32')
WAYS = {'plain': lambda: disable(), 'left to Keras': lambda: enable(tell=print), 'divided': lambda: enable(always=True)}


@pytest.fixture(autouse=True)
def disabled_after(cpu2, interpreted):
    """Files of models do not name a mode."""
    yield
    disable()


def same(script, tolerance=1e-5, ways=tuple(WAYS)):
    """Compare the list of arrays that a script returns in each of the ways; return the list of plain Keras."""
    found = {}
    for way in ways:
        np.random.seed(7)
        WAYS[way]()
        found[way] = script()
    for way in ways[1:]:
        assert len(found[way]) == len(found['plain']), way
        for i, (one, other) in enumerate(zip(found['plain'], found[way])):
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance, err_msg='%s, %d' % (way, i))
            if way == 'left to Keras':
                np.testing.assert_array_equal(other, one, 'to the bit')
    return found['plain']


def compiled(model=None, optimizer='adam', loss='categorical_crossentropy', **options):
    model = model or Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), L.Dense(3, activation='softmax')])
    model.compile(optimizer, loss, **options)
    return model


def trained(model, steps=3):
    """Return the losses of steps with batches of several lengths."""
    return [model.train_on_batch(X[i:i + 7 + i], Y[i:i + 7 + i]) for i in range(steps)]


def left(*models):
    return [value for model in models for value in model.get_weights() + model.optimizer.get_weights()]


def saved_to_a_file(model, path):
    model.save(str(path))
    return load_model(str(path))


def saved_to_a_stream(model, path):
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    return load_model(file)


def saved_to_a_group(model, path):
    with h5py.File(str(path), 'w') as file:
        model.save(file.create_group('inner'))
        return load_model(file['inner'])


def pickled(model, path):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.slow
@pytest.mark.parametrize('optimizer, copy', [
    ('adam', saved_to_a_file), ('adam', saved_to_a_stream),
    ('adam', saved_to_a_group), ('adam', pickled),
    ('rmsprop', saved_to_a_file),
    ('momentum', saved_to_a_file)])
def test_a_loaded_model_has_the_state_of_its_optimizer(optimizer, copy, tmp_path):
    """The model had none on contexts of the CPU: Keras asks for `_make_train_function` before it sets the state."""
    def script():
        momentum = keras.optimizers.SGD(0.1, momentum=0.9)
        model = compiled(optimizer=momentum if optimizer == 'momentum' else optimizer)
        losses = trained(model)
        other = copy(model, tmp_path / 'model.h5')
        state = other.optimizer.get_weights()
        return losses + state + trained(model) + trained(other) + left(model, other)
    same(script)


@pytest.mark.slow
def test_the_state_of_an_optimizer_is_there_before_the_first_batch():
    """`optimizer.set_weights` after `_make_train_function` raised: "expected 0 weights"."""
    def script():
        first, second = compiled(), compiled()
        trained(first)
        second._make_train_function()
        before = second.optimizer.get_weights()
        second.optimizer.set_weights(first.optimizer.get_weights())
        return before + trained(second) + left(second)
    assert len(same(script)) > 9


@pytest.mark.slow
def test_a_train_function_that_is_made_again_begins_with_a_new_state():
    def script():
        model = compiled()
        losses = trained(model)
        model.train_function = None
        return losses + trained(model) + left(model)
    same(script)


def test_functions_that_plain_keras_runs_are_those_of_keras():
    """The function `model.predict_function.function`, Theano's, was not there: scripts print or profile its graph."""
    def script():
        model = compiled(metrics=['accuracy'])
        trained(model), model.test_on_batch(X, Y), model.predict_on_batch(X)
        functions = model.train_function, model.test_function, model.predict_function
        assert all(type(each.function) is theano.compile.function_module.Function for each in functions)
        assert [each.name for each in functions] == ['train_function', 'test_function', 'predict_function']
        assert [len(each.outputs) for each in functions] == [2, 2, 1]
        return [len(each.function.maker.fgraph.toposort()) for each in functions] + [model.predict_function([X])[0]]
    mgpu.init('host0->cpu')  # on several contexts the model is not left to Keras
    same(script, ways=('plain', 'left to Keras'))


@pytest.mark.slow
@pytest.mark.parametrize('shapes', ['alike', 'different'])
def test_two_models_train_with_one_optimizer(shapes):
    """Adversarial networks often do so. Each model has moments of its own; the optimizer shows the last."""
    def script():
        optimizer = keras.optimizers.Adam(0.01)
        discriminator = compiled(optimizer=optimizer)
        discriminator.trainable = False
        generator = L.Dense(6, input_shape=(6,), use_bias=shapes == 'alike')
        combined = compiled(Sequential([generator, discriminator]), optimizer)
        losses = [each for _ in range(3) for each in trained(discriminator) + trained(combined, 2)]
        return losses + left(discriminator, combined)
    same(script)


class Counted(Model):
    """A model with its own `_make_train_function`, whose function records the length of each batch."""

    def _make_train_function(self):
        is_made = self.train_function is not None
        super()._make_train_function()
        if not is_made:
            self.calls, function = [], self.train_function
            self.train_function = lambda inputs: self.calls.append(len(inputs[0])) or function(inputs)


def test_a_model_overrides_what_makes_its_functions():
    def script():
        x = L.Input((6,))
        model = compiled(Counted(x, L.Dense(3, activation='softmax')(x)))
        history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0).history
        return [history['loss'], model.calls] + left(model)
    same(script)


def normalised():
    return Sequential([L.Dense(5, input_shape=(6,), use_bias=False), L.BatchNormalization(),
                       L.Dense(3, activation='softmax')])


@pytest.mark.slow
def test_a_function_keeps_the_graph_that_it_was_made_of():
    """A model that is frozen, or gets another optimizer, and is not compiled again, keeps its functions as they are."""
    def script():
        model = compiled(normalised(), 'sgd', metrics=['accuracy'])
        losses = trained(model) + [model.test_on_batch(X, Y)]
        model.trainable = False
        model.optimizer = keras.optimizers.Adam()
        with pytest.warns(UserWarning, match='Discrepancy'):
            losses += trained(model)
        return [np.array(loss) for loss in losses] + model.get_weights() + [model.predict(X)]
    same(script)


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize('always', [False, True])
def test_a_checkpoint_has_all_that_an_optimizer_updates(always, tmp_path):
    """The velocities of an optimizer that does not list them were made anew for the checkpoint, and stayed zero."""
    def fitted(path, killed_at=None):
        def kill(batch, logs):
            if batch == killed_at:
                raise Killed
        np.random.seed(3)
        model = compiled(optimizer=Unlisted())
        losses = model.fit(X, Y, batch_size=5, epochs=2, verbose=0, callbacks=[
            Checkpoint(str(path), every=1), keras.callbacks.LambdaCallback(on_batch_begin=kill)]).history['loss']
        return [losses] + model.get_weights()
    enable(always=always, tell=print)
    expected = fitted(tmp_path / 'whole.npz')
    with pytest.raises(Killed):
        fitted(tmp_path / 'run.npz', killed_at=3)
    for found, one in zip(fitted(tmp_path / 'run.npz'), expected):
        np.testing.assert_array_equal(found, one)


@pytest.mark.slow
def test_recurrent_states_of_a_model_go_from_one_function_to_the_next():
    def script():
        model = compiled(Sequential([L.SimpleRNN(3, stateful=True, batch_input_shape=(8, 2, 3)), L.Dense(3)]), 'sgd',
                         'mse')
        x, y = noise(8, 2, 3), noise(8, 3)
        found = [model.train_on_batch(x, y), model.test_on_batch(x, y), model.predict_on_batch(x)]
        model.reset_states()
        return found + [model.predict_on_batch(x), model.train_on_batch(x, y)] + left(model)
    same(script)


def test_strict_leaves_no_function_behind(cpu2, monkeypatch):
    """A model that strict mode had refused ran whole, silently, when it was called again."""
    monkeypatch.setattr(divided_model, 'may_fork', lambda: False)  # as if a GPU was open
    enable(strict=True)
    model = compiled()
    for _ in range(2):
        with pytest.raises(mgpu.GraphError, match='always=True'):
            model.train_on_batch(X, Y)


def test_models_of_one_optimizer_keep_their_weights_over_contexts(cpu2):
    """A second model got the weights of the first one, with which it shared an optimizer."""
    optimizer = keras.optimizers.Adam(0.01)
    first, second = compiled(optimizer=optimizer), compiled(optimizer=optimizer)
    parallel = [multi_gpu_model(model) for model in (first, second)]
    parallel[0].train_on_batch(X, Y)
    before = second.get_weights()
    parallel[1]._make_train_function()
    for one, other in zip(second.get_weights(), before):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_is_refused_for_a_train_function_of_the_users_own(cpu2, tmp_path):
    """A training by one, with a Checkpoint, was undone when the script ran again."""
    model = multi_gpu_model(compiled())
    model._make_train_function()
    model.train_function = lambda inputs: [np.array(1.)]
    with pytest.raises(mgpu.MgpuError, match='a train function of your own'):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Checkpoint(str(tmp_path / 'run.npz'))])


def test_functions_of_plain_keras_can_be_copied_under_enable(cpu2):
    """The copy ended with: 'function' object has no attribute 'copied'."""
    enable(tell=str)
    try:
        model = compiled()
        expected = model.predict_on_batch(X)
        np.testing.assert_array_equal(model.predict_function.function.copy()(X)[0], expected)
    finally:
        disable()
        mgpu.disable()


def test_a_train_function_whose_making_was_interrupted_is_made_again(cpu2, monkeypatch):
    """A Checkpoint said later that the model has a train function of the user's own."""
    model, original = multi_gpu_model(compiled()), ModelFunction.compile

    def interrupted(function):
        monkeypatch.setattr(ModelFunction, 'compile', original)
        raise KeyboardInterrupt
    monkeypatch.setattr(ModelFunction, 'compile', interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.train_on_batch(X, Y)
    assert model.train_function is None
    model.train_on_batch(X, Y)
    assert len(model.train_function.function.contexts) == 2
