"""The template and its replicas are one model: weights, callbacks, files."""
import csv
import os
import pickle

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import callbacks as C
from keras import layers as L
from keras.models import Sequential, load_model
from support import keras_zoo as zoo
from support.keras_equivalence import QUICK, assert_equal, built, everything, values
from support.keras_zoo import OPTIMIZERS, dense, noise, one_hot
from support.processes import python

pytestmark = pytest.mark.usefixtures('interpreted')  # files of models do not name a mode
X, Y = noise(20, 6).astype('float32'), one_hot(20).astype('float32')


@pytest.fixture
def pair(contexts):
    """Return a parallel model on two contexts and plain Keras, with the same weights, compiled."""
    contexts('cpu', 2)
    return compiled(multi_gpu_model(built(dense))), compiled(built(dense))


def compiled(model, optimizer='adam'):
    model.compile(OPTIMIZERS[optimizer](), 'categorical_crossentropy', metrics=['accuracy'], mode=QUICK)
    return model


def fit(model, **kwargs):
    np.random.seed(5)
    return model.fit(X, Y, batch_size=8, verbose=0, **dict({'epochs': 2}, **kwargs)).history


def assert_same_history(history, expected, rtol=1e-4):
    assert history.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=rtol, err_msg=key)


@pytest.mark.slow
def test_fit_evaluate_predict(pair):
    histories = [fit(model, validation_split=0.3, shuffle=True) for model in pair]
    assert_same_history(*histories)
    parallel, plain = pair
    np.testing.assert_allclose(parallel.evaluate(X, Y, batch_size=7, verbose=0), plain.evaluate(X, Y, batch_size=7,
                                                                                            verbose=0), rtol=1e-4)
    np.testing.assert_allclose(parallel.predict(X, batch_size=7), plain.predict(X, batch_size=7), rtol=1e-4)
    np.testing.assert_allclose(parallel.predict_proba(X), plain.predict_proba(X), rtol=1e-4)
    np.testing.assert_array_equal(parallel.predict_classes(X), plain.predict_classes(X))
    assert parallel.metrics_names == plain.metrics_names


def test_the_template_sees_what_was_trained(pair):
    parallel, plain = pair
    fit(parallel), fit(plain)
    template = parallel.template
    assert_equal([('', w) for w in template.get_weights()], [('', w) for w in plain.get_weights()], 1e-5)
    np.testing.assert_allclose(template.predict(X), plain.predict(X), rtol=1e-4)
    np.testing.assert_allclose(template.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-4)


@pytest.mark.slow
def test_the_replicas_see_what_is_set(pair, tmp_path):
    parallel, plain = pair
    fit(parallel), fit(plain)
    other = [w + 0.1 for w in plain.get_weights()]
    parallel.template.set_weights(other)
    plain.set_weights(other)
    assert_same_history(fit(parallel), fit(plain))
    plain.save_weights(str(tmp_path / 'w.h5'))
    for model in pair:
        fit(model)
        model.load_weights(str(tmp_path / 'w.h5'))
    np.testing.assert_allclose(parallel.predict(X), plain.predict(X), rtol=1e-4)
    for model in pair:
        K.set_value(model.optimizer.learning_rate, 0.1)
    assert_same_history(fit(parallel), fit(plain))


def test_training_the_template_reaches_the_replicas(pair):
    parallel, plain = pair
    fit(parallel), fit(plain)
    for model in (parallel.template, plain):
        model.compile('sgd', 'categorical_crossentropy', mode=QUICK)
        fit(model)
    np.testing.assert_allclose(parallel.predict(X), plain.predict(X), rtol=1e-4)


@pytest.mark.slow
def test_callbacks(pair, tmp_path):
    """Each callback changes the model or stops training; both models go the same way."""
    histories, files = [], []
    for i, model in enumerate(pair):
        path, log, seen = str(tmp_path / ('m%d.h5' % i)), str(tmp_path / ('log%d.csv' % i)), []
        histories.append(fit(model, epochs=12, validation_data=(X[:5], Y[5:10]), callbacks=[
            C.LearningRateScheduler(lambda epoch, rate: rate * 1.1), C.CSVLogger(log), C.TerminateOnNaN(),
            C.ReduceLROnPlateau(monitor='val_loss', patience=1, factor=0.5, min_delta=0.5),
            C.EarlyStopping(monitor='val_loss', patience=3, min_delta=0.01, restore_best_weights=True),
            C.ModelCheckpoint(path, save_best_only=True),
            C.LambdaCallback(on_epoch_end=lambda epoch, logs, model=model, seen=seen: seen.append(
                model.layers[0].get_weights()[0].sum()))]))
        with open(log) as f:
            files.append((list(csv.reader(f)), load_model(path).get_weights(), seen))
    assert_same_history(*histories)
    assert 3 < len(histories[0]['loss']) < 12 and len(np.unique(histories[0]['lr'])) > 2
    assert_equal([('', w) for w in pair[0].get_weights()], [('', w) for w in pair[1].get_weights()], 1e-4)
    (rows, saved, seen), (plain_rows, plain_saved, plain_seen) = files
    assert len(rows) == len(plain_rows) and rows[0] == plain_rows[0]
    assert_equal([('', w) for w in saved], [('', w) for w in plain_saved], 1e-4)
    np.testing.assert_allclose(seen, plain_seen, rtol=1e-4)


def test_a_nan_ends_training(pair):
    for model in pair:
        K.set_value(model.optimizer.learning_rate, np.nan)
        assert len(fit(model, epochs=5, callbacks=[C.TerminateOnNaN()])['loss']) == 1


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', [
    'adam', 'nesterov, decay', 'rmsprop', 'amsgrad'])
def test_a_saved_model_goes_on_where_it_stopped(optimizer, contexts, tmp_path):
    """After load_model and multi_gpu_model, the losses are as if training had never been interrupted."""
    contexts('cpu', 2)
    path = str(tmp_path / 'model.h5')
    parallel = compiled(multi_gpu_model(built(dense)), optimizer)
    fit(parallel, shuffle=False)
    parallel.save(path)
    uninterrupted = fit(parallel, shuffle=False, epochs=3)
    resumed = multi_gpu_model(load_model(path))
    assert_same_history(fit(resumed, shuffle=False, epochs=3), uninterrupted, rtol=1e-6)
    assert_equal(values(resumed.optimizer.weights), values(parallel.optimizer.weights), 1e-6)
    resumed.save(path)  # the same optimizer, its state included, is still the one that is saved
    assert_equal(values(load_model(path).optimizer.weights), values(parallel.optimizer.weights), 1e-6)


PLAIN_KERAS = '''
import sys, types
package = types.ModuleType('theano_mgpu')    # compat alone: the package itself is never executed
package.__path__ = [%r]
sys.modules['theano_mgpu'] = package
from theano_mgpu import compat
compat.before_theano()
compat.import_theano()
import keras
import numpy as np
model = keras.models.load_model(%r)
assert type(model) is keras.%s, type(model)
np.savez(%r, *(model.get_weights() + model.optimizer.get_weights()))
assert not [name for name in sys.modules if name.startswith('theano_mgpu.') and name.split('.')[1] not in
            ('comm', 'compat', 'config', 'errors', 'parsing', 'utils')]
'''


@pytest.mark.slow
@pytest.mark.parametrize('build,kind', [(dense, 'Sequential'),
                                        (zoo.nested, 'Model')])
def test_plain_keras_opens_the_file(build, kind, contexts, tmp_path):
    contexts('cpu', 2)
    parallel = compiled(multi_gpu_model(built(build)))
    parallel.train_on_batch(X, Y)
    path, out = str(tmp_path / 'm.h5'), str(tmp_path / 'w.npz')
    parallel.save(path)
    python('-c', PLAIN_KERAS % (os.path.dirname(mgpu.__file__), path, kind, out))
    with np.load(out) as found:
        expected = parallel.get_weights() + parallel.optimizer.get_weights()
        assert_equal([('', found['arr_%d' % i]) for i in range(len(found.files))], [('', w) for w in expected], 0)


def test_configuration_and_weights_round_trip(pair, tmp_path):
    parallel, _ = pair
    path = str(tmp_path / 'w.h5')
    parallel.save_weights(path)
    copy = keras.models.model_from_json(parallel.to_json())
    assert type(copy) is Sequential
    copy.load_weights(path)
    np.testing.assert_allclose(copy.predict(X), parallel.predict(X), rtol=1e-4)
    keras.models.save_model(parallel, path)
    assert type(load_model(path)) is Sequential


def test_a_pickle_gives_plain_keras(pair):
    parallel, _ = pair
    fit(parallel)
    copy = pickle.loads(pickle.dumps(parallel))
    assert type(copy) is Sequential
    np.testing.assert_allclose(copy.predict(X), parallel.predict(X), rtol=1e-4)
    assert_equal(values(copy.optimizer.weights), values(parallel.optimizer.weights), 0)


def test_a_template_that_was_not_compiled_follows_each_compile(pair, tmp_path):
    parallel, _ = pair
    parallel.compile('sgd', 'mse', mode=QUICK)
    fit(parallel)
    parallel.template.save(str(tmp_path / 'm.h5'))
    saved = load_model(str(tmp_path / 'm.h5'))
    assert saved.loss == 'mse' and type(saved.optimizer) is keras.optimizers.SGD
    assert_equal(values(saved.optimizer.weights), values(parallel.optimizer.weights), 0)


def test_summary_is_the_templates(pair):
    texts = []
    for model in (pair[0], pair[0].template):
        lines = []
        model.summary(print_fn=lines.append)
        texts.append(lines)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_freezing_the_template_freezes_the_replicas(contexts):
    contexts('cpu', 2)
    results = []
    for wrap in (multi_gpu_model, lambda model: model):
        template = built(lambda: Sequential([L.Dense(4, activation='tanh', input_shape=(6,)), L.Dense(4), zoo.head()]))
        model = compiled(wrap(template))
        history = [model.train_on_batch(X, Y)]
        template.layers[0].trainable = False
        compiled(model)
        frozen = template.layers[0].get_weights()[0]
        history.append(model.train_on_batch(X, Y))
        np.testing.assert_array_equal(template.layers[0].get_weights()[0], frozen)
        results.append(everything(model, history))
    assert_equal(*results, 1e-5)
    model = multi_gpu_model(template)
    template.trainable = False
    assert model.trainable_weights == [] and len(model.non_trainable_weights) == 6


def test_reset_metrics_and_states(pair):
    parallel, _ = pair
    parallel.train_on_batch(X, Y, reset_metrics=False)
    assert K.get_value(parallel.metrics[0].count) == 20
    parallel.reset_metrics()
    assert K.get_value(parallel.metrics[0].count) == 0
    parallel.reset_states()
