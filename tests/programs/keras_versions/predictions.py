"""A Predictor over two contexts, and Keras's own predict, for the Keras that is installed; fails where they differ.

predictions.py compare KIND ...             compares them for models of `zoo`
predictions.py write FOLDER KIND ...        writes model files and Keras's own predictions
predictions.py read FOLDER                  predicts with the command for each file there, and prints its messages
predictions.py write-and-read FOLDER KIND ...
"""
import contextlib
import io
import json
import sys
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.compat import keras_versions
from theano_mgpu.keras import Predictor

import keras
import numpy as np
import zoo
from keras import backend as K
from keras.models import Sequential, load_model


def listed(value):
    return value if isinstance(value, list) else [value]


def assert_equal(ours, theirs, tolerance=1e-10):
    assert len(listed(ours)) == len(listed(theirs))
    for one, other in zip(listed(ours), listed(theirs)):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def trained(kind):
    np.random.seed(7)
    model, x, y, _ = zoo.KINDS[kind]()
    model.fit(x, y, batch_size=8, verbose=0, **{zoo.EPOCHS: 1})
    return model, x


def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return type(error), str(error)


def compare(kind):
    model, x = trained(kind)
    expected = model.predict(x, batch_size=8)
    with Predictor(model) as predictor:
        assert len(predictor.replicas) == 2
        assert_equal(predictor.predict(x, batch_size=8), expected)
        batches = [[array[start:stop] for array in listed(x)] for start, stop in ((0, 5), (5, 6), (6, 21))]
        for outputs, batch in zip(predictor.map(batches), batches):
            assert_equal(outputs, model.predict(batch))
        if isinstance(model, Sequential):
            assert_equal(predictor.predict_proba(x), model.predict_proba(x, verbose=0))
            assert_equal(predictor.predict_classes(x), model.predict_classes(x, verbose=0))
        rows = np.ones((3, 99))
        for wrong in (rows, rows[:, 0], [rows] * 3, {'unknown': rows}):
            assert error_of(predictor.predict, wrong) == error_of(model.predict, wrong) is not None
        model.set_weights([weight * 0 for weight in model.get_weights()])
        predictor.refresh()
        assert_equal(predictor.predict(x), model.predict(x))


def refuse():
    for model, words in ((zoo.with_a_state()[0], 'is stateful'), (Sequential(), 'is not built yet')):
        kind, message = error_of(Predictor, model)
        assert kind is ValueError and words in message, message


def write(folder, kinds):
    for kind in kinds:
        model, x = trained(kind)
        name = '%s %s' % (keras.__version__, kind)
        model.save(str(folder / (name + '.h5')))
        np.savez(str(folder / (name + '.x.npz')), *listed(x))
        np.savez(str(folder / (name + '.y.npz')), *listed(model.predict(x)))


def read(folder):
    """Return the messages of the command for each file, empty where it predicts what Keras that wrote it does."""
    return {path.stem: message_for(path, folder) for path in sorted(folder.glob('*.h5'))}


def message_for(path, folder):
    x, expected = (list(np.load(str(path.with_suffix('.%s.npz' % name))).values()) for name in 'xy')
    names = plain = None
    try:
        model = load_model(str(path), **({'compile': False} if zoo.OF_2 else {}))
        names, plain = keras_versions.inner(model), listed(model.predict(x))
        np.savez(str(folder / 'x.npz'), **dict(zip(names.input_names, x)))
    except Exception:  # so the command cannot load it, either
        np.savez(str(folder / 'x.npz'), *x)
    message = io.StringIO()
    with contextlib.redirect_stderr(message):
        code = main(['predict', '--quiet', '--safe', str(path), str(folder / 'x.npz'), str(folder / 'y.npz')])
    assert code == (0 if plain else 2), message.getvalue()
    if plain:
        written = np.load(str(folder / 'y.npz'))
        assert_equal([written[name] for name in names.output_names], plain, 1e-6)
        assert_equal([written[name] for name in names.output_names], expected, 1e-5)
    return message.getvalue()


if __name__ == '__main__':
    mgpu.init('a->cpu;b->cpu')
    action, *words = sys.argv[1:]
    if action == 'compare':
        for kind in words:
            compare(kind)
        refuse()
        print(json.dumps(keras.__version__))
    else:
        K.set_floatx('float32')  # as the command has it
        folder = Path(words[0])
        if action.startswith('write'):
            write(folder, words[1:])
        print(json.dumps(read(folder) if action.endswith('read') else None))
