"""`enable()`: Keras's own ways of use, unchanged, on two contexts and in plain Keras, with the same seed."""
import copy
import pickle

from theano_mgpu.auto.divided_model import divided_model_of
from theano_mgpu.keras import disable, enable
from theano_mgpu.keras.hooks import keras_loops

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import callbacks as C
from keras import layers as L
from keras.models import Model, Sequential, clone_model, model_from_json
from keras.wrappers.scikit_learn import KerasClassifier, KerasRegressor
from support import keras_zoo as zoo
from support.keras_equivalence import QUICK
from support.keras_zoo import dense, head, noise, one_hot

X, Y = noise(43, 6).astype('float32'), one_hot(43).astype('float32')
SEQUENCES = noise(43, 5, 4).astype('float32')
MODE = {'cpu': QUICK, 'gpu': None}


@pytest.fixture(autouse=True)
def disabled_after():
    yield
    disable()


@pytest.fixture(params=['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def kind(request):
    """Return a kind of context: `cpu`, or in slow tests OpenCL's or CUDA's."""
    return request.param


@pytest.fixture
def compiled(kind):
    """Return a function that compiles a model."""
    def compile(model, optimizer='adam', loss='categorical_crossentropy', **kwargs):
        model.compile(optimizer, loss, **dict({'metrics': ['accuracy'], 'mode': MODE[kind]}, **kwargs))
        return model
    return compile


@pytest.fixture
def same(contexts, kind, interpreted):
    """Return a function that runs a script in plain Keras and on two contexts, and compares the results."""
    def check(script, tolerance=1e-5):
        results = []
        for several in (False, True):
            contexts(kind, 2)
            report = enable(always=True) if several else disable()
            np.random.seed(7)
            results.append(script())
        assert_alike(results[1], results[0], tolerance)
        assert report and all(len(usage.contexts) == 2 for usage in report.usages if usage.samples)
        return report
    return check


def assert_alike(found, expected, tolerance, where='result'):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected)):
            assert_alike(*pair, tolerance, '%s[%d]' % (where, i))
    elif isinstance(expected, str):
        assert found == expected, where
    else:
        np.testing.assert_allclose(found, expected, rtol=0, err_msg=where,
                                   atol=tolerance * max(1.0, float(np.abs(expected).max() if np.size(expected) else 0)))


def left_behind(model):
    """Return the weights and the optimizer's state."""
    return model.get_weights() + model.optimizer.get_weights()


# --- Training ------------------------------------------------------------------------------------

@pytest.mark.cuda
def test_sequential_training(same, compiled):
    def script():
        model = compiled(dense())
        history = model.fit(X, Y, batch_size=10, epochs=2, validation_split=0.3, verbose=0).history
        return [history, model.evaluate(X, Y, batch_size=9, verbose=0), model.predict(X, batch_size=8),
                model.predict_proba(X), model.predict_classes(X), model.train_on_batch(X[:3], Y[:3]),
                model.test_on_batch(X[:5], Y[:5]), model.predict_on_batch(X[:1]), left_behind(model)]
    report = same(script)
    samples = [(usage.name.split()[1], usage.samples) for usage in report.usages]
    assert samples == [('train', 30 * 2 + 3), ('test', 13 * 2 + 43 + 5), ('predict', 43 * 3 + 1)]
    assert 'sequential' in str(report) and '63' in str(report)


def test_functional_training_with_loss_weights(same, kind):
    other, place = noise(43, 4, seed=3), noise(43, 2, seed=4)

    def script():
        model = zoo.functional()
        model.compile('rmsprop', loss={'kind': 'categorical_crossentropy', 'place': 'mse'}, mode=MODE[kind],
                      loss_weights={'kind': 0.3, 'place': 2.0}, metrics={'kind': 'accuracy', 'place': ['mae']},
                      weighted_metrics=['mse'])
        targets = {'kind': Y, 'place': place}
        history = model.fit([X, other], targets, batch_size=10, epochs=2, verbose=0,
                            sample_weight={'kind': np.linspace(0, 2, 43), 'place': np.ones(43)}).history
        return [history, model.evaluate([X, other], targets, verbose=0), model.predict([X, other]), left_behind(model)]
    same(script)


@pytest.mark.slow
def test_class_and_sample_weights(same, compiled):
    def script():
        model = compiled(dense(), weighted_metrics=['accuracy'])
        histories = [model.fit(X, Y, batch_size=10, verbose=0, **weights).history
                     for weights in ({'class_weight': {0: 1., 1: 5., 2: .5}}, {'sample_weight': np.arange(43.)})]
        timewise = compiled(Sequential([L.TimeDistributed(L.Dense(3, activation='softmax'), input_shape=(5, 4))]),
                            sample_weight_mode='temporal')
        histories.append(timewise.fit(SEQUENCES, np.eye(3)[zoo.labels(43 * 5)].reshape(43, 5, 3), batch_size=10,
                                      sample_weight=np.abs(noise(43, 5)), verbose=0).history)
        return histories + left_behind(model) + left_behind(timewise)
    same(script)


def test_a_loss_of_each_sample_and_a_regularizer_that_is_a_sum_over_them(same, compiled):
    def script():
        hidden = L.Dense(4, activity_regularizer='l2', input_shape=(6,))
        model = compiled(Sequential([hidden, head()]), loss=keras.losses.MeanSquaredError(reduction='none'))
        return [model.fit(X, Y, batch_size=10, verbose=0).history, left_behind(model)]
    same(script)


def test_metrics(same, compiled):
    def precise(y_true, y_pred):
        return K.mean(K.square(y_true - y_pred))

    def script():
        metrics = ['accuracy', precise, keras.metrics.Precision(), keras.metrics.AUC(num_thresholds=7),
                   keras.metrics.CosineSimilarity()]
        model = compiled(dense(), metrics=metrics)
        history = model.fit(X, Y, batch_size=10, epochs=2, verbose=0, validation_data=(X[:9], Y[:9])).history
        steps = [model.train_on_batch(X[:11], Y[:11], reset_metrics=reset) for reset in (True, False, False)]
        return [list(history.values()), steps, [K.get_value(w) for m in model.metrics for w in m.weights]]
    same(script)


@pytest.mark.slow
def test_a_masking_layer_and_a_mask_that_reaches_the_loss(same, compiled):
    data = SEQUENCES.copy()
    data[::3, 2:] = 0

    def script():
        model = Sequential([L.Masking(input_shape=(5, 4)), L.SimpleRNN(3, return_sequences=True),
                            L.TimeDistributed(L.Dense(2))])
        compiled(model, loss='mse', metrics=['mae'])
        return [model.fit(data, noise(43, 5, 2), batch_size=10, verbose=0).history, left_behind(model)]
    same(script)


@pytest.mark.slow
def test_trainability(same, compiled):
    """Frozen layers keep their weights; the setting at compile counts, as in Keras."""
    def script():
        model = compiled(Sequential([L.Dense(4, activation='tanh', input_shape=(6,)), L.Dense(4), head()]))
        results = [model.fit(X, Y, verbose=0).history]
        model.layers[0].trainable = False
        with pytest.warns(UserWarning, match='Discrepancy'):
            model._make_train_function()
            model.train_on_batch(X, Y)
        compiled(model)
        frozen = model.layers[0].get_weights()
        results += [model.fit(X, Y, verbose=0).history]
        np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen[0])
        model.trainable = False
        return results + left_behind(model) + [len(model.trainable_weights)]
    same(script)


class Batches(keras.utils.Sequence):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return X[i * 9:i * 9 + 9], Y[i * 9:i * 9 + 9]


@pytest.mark.slow
@pytest.mark.parametrize('processes', [False, True])
def test_generators(processes, same, compiled):
    """Generators use threads, or processes that are forked while the devices are open."""
    def script():
        model = compiled(dense())
        options = {'workers': 2, 'use_multiprocessing': processes, 'max_queue_size': 3}
        history = model.fit_generator(Batches(), epochs=2, verbose=0, shuffle=False, validation_data=Batches(),
                                      **options).history
        return [history, model.evaluate_generator(Batches(), **options), model.predict_generator(Batches(), **options),
                left_behind(model)]
    same(script)


@pytest.mark.slow
def test_a_plain_generator(same, compiled):
    def batches():
        while True:
            for i in range(0, 43, 10):
                yield X[i:i + 10], Y[i:i + 10], np.linspace(1, 2, len(X[i:i + 10]))

    def script():
        model = compiled(dense())
        return [model.fit_generator(batches(), steps_per_epoch=5, epochs=2, verbose=0).history, left_behind(model)]
    same(script)


# --- Files and copies ----------------------------------------------------------------------------

@pytest.mark.slow
def test_copies(same, compiled):
    """A pickled or copied model runs over the contexts, too, and goes on with the optimizer's state."""
    def script():
        model = compiled(dense())
        model.fit(X, Y, verbose=0)
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        assert len({type(each) for each in copies + [model]}) == 1
        assert len({divided_model_of(each) is None for each in copies + [model]}) == 1
        others = [clone_model(model), model_from_json(model.to_json())]
        for each in others:
            each.set_weights(model.get_weights())
        return [[each.fit(X, Y, verbose=0, shuffle=False).history for each in copies],
                [left_behind(each) for each in copies + [model]], [each.predict(X) for each in others]]
    same(script)


# --- Kinds of model ------------------------------------------------------------------------------

class Subclassed(Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = L.Dense(5, activation='tanh'), head()

    def call(self, x):
        return self.out(self.hidden(x))


@pytest.mark.slow
def test_a_subclassed_model(same, compiled):
    """Keras builds it with the first batch, and compiles it then."""
    def script():
        model = compiled(Subclassed())
        history = model.fit(X, Y, batch_size=10, epochs=2, verbose=0).history
        return [history, model.evaluate(X, Y, verbose=0), model.predict(X), left_behind(model)]
    report = same(script)
    assert report.usages[0].samples == 86


def test_the_first_batches_of_a_model_that_is_not_built_are_looked_ahead_for(contexts, compiled, interpreted):
    contexts('cpu', 2)
    enable(always=True)
    seen = []
    callback = C.LambdaCallback(on_batch_begin=lambda batch, logs: seen.append(keras_loops.running.batches is not None))
    compiled(Subclassed()).fit(X, Y, batch_size=30, verbose=0, callbacks=[callback])
    assert seen == [True, True]


class Shouting(Sequential):
    """A class of the user's with its own `fit`, which calls Keras's."""

    def fit(self, x, y, loud=False):
        return super().fit(x, y, batch_size=10, verbose=0)


def test_a_class_with_a_fit_of_its_own(same, compiled):
    same(lambda: compiled(Shouting([L.Dense(3, input_shape=(6,))]), loss='mse').fit(X, Y, loud=True).history)


def test_a_sequential_model_without_an_input_shape(same, compiled):
    def script():
        model = compiled(Sequential([L.Dense(4, activation='tanh'), head()]))
        return [model.fit(X, Y, batch_size=10, verbose=0).history, model.predict(X)]
    same(script)


def test_a_model_that_is_not_compiled_predicts(same):
    report = same(lambda: dense().predict(X, batch_size=10))
    assert report.usages[0].samples == 43


def test_scikit_learn_wrappers(same, compiled):
    def classifier(units=4):
        return compiled(Sequential([L.Dense(units, activation='tanh', input_shape=(6,)), head()]))

    def regressor():
        return compiled(Sequential([L.Dense(1, input_shape=(6,))]), 'sgd', 'mse', metrics=[])

    def script():
        classes = zoo.labels(43)
        estimator = KerasClassifier(classifier, units=3, epochs=2, batch_size=10, verbose=0)
        history = estimator.fit(X, classes).history
        linear = KerasRegressor(regressor, epochs=1, batch_size=10, verbose=0)
        linear.fit(X, X[:, 0])
        return [history, estimator.predict(X), estimator.predict_proba(X), estimator.score(X, classes),
                linear.predict(X), linear.score(X, X[:, 0])]
    same(script)


# --- Models that share layers --------------------------------------------------------------------

def test_a_gan(same, compiled):
    """The discriminator is compiled, then frozen in the combined model; both are trained in turns."""
    def script():
        generator = Sequential([L.Dense(5, activation='tanh', input_shape=(2,)), L.Dense(6)])
        discriminator = Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), L.Dense(1, activation='sigmoid')])
        compiled(discriminator, loss='binary_crossentropy')
        discriminator.trainable = False
        z = L.Input((2,))
        combined = compiled(Model(z, discriminator(generator(z))), loss='binary_crossentropy')
        results = []
        for step in range(4):
            latent = noise(11, 2, seed=step)
            faked = generator.predict(latent)
            before = discriminator.get_weights()
            results.append(discriminator.train_on_batch(np.concatenate([X[:11], faked]), np.repeat([1, 0], 11)))
            assert np.abs(discriminator.get_weights()[0] - before[0]).max() > 0
            before = discriminator.get_weights()
            results.append(combined.train_on_batch(latent, np.ones(11)))
            np.testing.assert_array_equal(discriminator.get_weights()[0], before[0])
        return results + generator.get_weights() + discriminator.get_weights()
    with pytest.warns(UserWarning, match='Discrepancy'):
        same(script)


def test_models_of_shared_layers_trained_alternately(same, compiled):
    def script():
        a = L.Input((6,))
        hidden = L.Dense(5, activation='tanh')(a)
        one = compiled(Model(a, head()(hidden)))
        other = compiled(Model(a, L.Dense(6)(hidden)), 'sgd', 'mse', metrics=['mae'])
        results = []
        for _ in range(3):
            results += [one.train_on_batch(X, Y), other.train_on_batch(X, X), one.test_on_batch(X, Y)]
        return results + left_behind(one) + left_behind(other)
    same(script)


def test_a_function_of_trained_tensors_sees_current_weights(same, compiled):
    def script():
        model = compiled(dense())
        hidden = K.function([model.input], [model.layers[0].output])
        results = []
        for _ in range(2):
            model.train_on_batch(X, Y)
            results.append(hidden([X])[0])
        assert np.abs(results[0] - results[1]).max() > 1e-4
        model.layers[0].set_weights([w + 1 for w in model.layers[0].get_weights()])
        return results + [hidden([X])[0], model.predict(X)]
    same(script)


def test_a_model_in_a_model(same, compiled):
    def script():
        base = compiled(dense())
        base.fit(X, Y, verbose=0)
        base.trainable = False
        a = L.Input((6,))
        whole = compiled(Model(a, L.Dense(3, activation='softmax')(base(a))))
        return [whole.fit(X, Y, batch_size=10, verbose=0).history, left_behind(whole), base.get_weights()]
    same(script)
