"""Keras's files with h5py 3, by compat alone."""
import subprocess
import sys
import types

from theano_mgpu import compat

import h5py
import keras
import numpy as np
import pytest
from keras.engine import saving
from keras.layers import Dense, Embedding, Flatten
from keras_addon.equivalence import QUICK

X, Y = np.arange(12).reshape(6, 2) % 5, np.arange(6.0)[:, None]


def small():
    return keras.Sequential([Embedding(5, 3, input_length=2), Flatten(), Dense(1)])


def state(model):
    return model.get_weights() + model.optimizer.get_weights()


@pytest.fixture
def trained():
    model = small()
    model.compile('adam', 'mse', mode=QUICK)
    model.train_on_batch(X, Y)
    return model


def test_a_model_and_its_optimizer_come_back(trained, tmp_path):
    path = str(tmp_path / 'm.h5')
    trained.save(path)
    copies = [keras.models.load_model(path)]
    with h5py.File(path, 'r') as f:
        copies.append(keras.models.load_model(f))
    for copy in copies:
        assert all((a == b).all() for a, b in zip(state(copy), state(trained)))


@pytest.mark.parametrize('by_name', [False, True])
def test_weights_come_back(by_name, trained, tmp_path):
    path, whole = str(tmp_path / 'w.h5'), str(tmp_path / 'm.h5')
    trained.save_weights(path)
    trained.save(whole)
    for file in (path, whole):
        copy = small()
        for ours, its in zip(copy.layers, trained.layers):
            ours.name = its.name
        copy.load_weights(file, by_name=by_name)
        assert all((a == b).all() for a, b in zip(copy.get_weights(), trained.get_weights()))


@pytest.mark.parametrize('convert', [lambda text: np.bytes_(text), lambda text: text.decode()], ids=['bytes', 'text'])
def test_attributes_of_either_h5py_are_read(convert, trained, tmp_path):
    """h5py 2 wrote fixed-length bytes, other tools write text."""
    path = str(tmp_path / 'w.h5')
    trained.save_weights(path)
    with h5py.File(path, 'a') as f:
        names = [name if isinstance(name, bytes) else name.encode() for name in f.attrs['layer_names']]
        f.attrs['layer_names'] = [convert(name) for name in names]
        for key in ('keras_version', 'backend'):
            f.attrs[key] = convert(compat._as_bytes(f.attrs[key]))
    copy = small()
    copy.load_weights(path)
    assert all((a == b).all() for a, b in zip(copy.get_weights(), trained.get_weights()))


@pytest.mark.skipif(int(h5py.__version__.split('.')[0]) < 3, reason='h5py 2 needs no mend')
def test_without_the_mend_keras_fails(trained, tmp_path, monkeypatch):
    path = str(tmp_path / 'm.h5')
    trained.save(path)
    monkeypatch.setattr(saving.H5Dict, '__getitem__', saving.H5Dict.__getitem__.__wrapped__)
    with pytest.raises(AttributeError, match='decode'):
        keras.models.load_model(path)
    monkeypatch.undo()
    monkeypatch.setattr(saving, 'load_weights_from_hdf5_group', saving.load_weights_from_hdf5_group.__wrapped__)
    with pytest.raises(AttributeError, match='decode'):
        trained.load_weights(path)


def test_keras_is_mended_when_somebody_imports_it():
    code = ('import sys, theano_mgpu; assert "keras" not in sys.modules\n'
            'import keras; assert hasattr(keras.engine.saving.H5Dict.__getitem__, "__wrapped__")')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_that_is_there_is_mended_at_once(monkeypatch):
    module = types.ModuleType('already_there')
    monkeypatch.setitem(sys.modules, 'already_there', module)
    seen = []
    compat.after_import('already_there', seen.append)
    assert seen == [module]
