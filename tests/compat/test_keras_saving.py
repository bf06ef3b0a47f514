"""Keras's files with h5py 3, by the patches alone."""
import importlib.util
import io
import os
import pickle
import sys
import types

from theano_mgpu.compat import import_hooks, keras_saving

import h5py
import keras
import numpy as np
import pytest
from keras.engine import saving
from keras.layers import Dense, Embedding, Flatten, Layer
from keras.utils import HDF5Matrix
from support.keras_equivalence import QUICK
from support.processes import python

pytestmark = pytest.mark.usefixtures('interpreted')
H5PY_3 = int(h5py.__version__.split('.')[0]) >= 3
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


def test_training_goes_on_exactly(trained, tmp_path):
    path = str(tmp_path / 'm.h5')
    trained.save(path)
    copy = keras.models.load_model(path)
    for _ in range(3):  # to rounding: a file does not hold `mode`, so the copy is compiled with another linker
        np.testing.assert_allclose(copy.train_on_batch(X, Y), trained.train_on_batch(X, Y), rtol=1e-6)
    for ours, its in zip(state(copy), state(trained)):
        np.testing.assert_allclose(ours, its, rtol=1e-5, atol=1e-7)


def test_a_model_is_saved_to_a_stream(trained, tmp_path, monkeypatch):
    with open(str(tmp_path / 'm.h5'), 'w+b') as file:
        for stream in (io.BytesIO(), file):
            trained.save(stream)
            stream.seek(0)
            copy = keras.models.load_model(stream)
            assert all((a == b).all() for a, b in zip(state(copy), state(trained)))
    if H5PY_3:
        monkeypatch.setattr(h5py.File, '__init__', h5py.File.__init__.__wrapped__)
        with pytest.raises(OSError, match='unable to open file'):
            trained.save(io.BytesIO())


def test_h5py_files_are_opened_and_read_as_by_h5py_2(tmp_path):
    """TheanoLM ended with "Unable to synchronously open file", or without an attribute `value`."""
    path = str(tmp_path / 'state.h5')
    with h5py.File(name=path) as file:  # without a mode
        file['a'] = [1, 2]
    with h5py.File(path) as file:
        file['b'] = file['a'].value + 1
    os.chmod(path, 0o444)
    with h5py.File(path) as file:
        assert file['b'].value.tolist() == [2, 3] and file.fid == file.id
        assert os.geteuid() == 0 or file.mode == 'r'
    with pytest.raises(OSError):
        h5py.File(str(tmp_path / 'none' / 'state.h5'))
    with pytest.raises(OSError):
        h5py.File(str(tmp_path / 'none.h5'), 'r')


def test_a_matrix_is_opened_to_read(tmp_path):
    """The second process ended with "unable to lock file": a file that can be written is locked."""
    path = str(tmp_path / 'x.h5')
    with h5py.File(path, 'w') as file:
        file['x'] = np.arange(12.).reshape(6, 2)
    matrix = HDF5Matrix(path, 'x')
    code = 'import sys, h5py; print(h5py.File(sys.argv[1], "r")["x"][()].sum())'
    assert python('-c', code, path).stdout == '66.0\n' and HDF5Matrix.refs[path].mode == 'r'
    assert matrix[1:3].tolist() == [[2, 3], [4, 5]] and HDF5Matrix(path, 'x', start=4).shape == (2, 2)


def test_the_ranks_of_a_job_open_a_file_that_exists_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(keras_saving, '_sharing', True)
    for mode in 'r+', 'r':  # it is made, then read
        with h5py.File(str(tmp_path / 'x.h5')) as file:
            assert file.mode == mode


class EqualNames(Layer):
    """A layer with two weights of one name, which the file has to tell apart."""

    def build(self, shape):
        self.pair = [self.add_weight('w', (3,), initializer=value) for value in ('ones', 'zeros')]
        super().build(shape)

    def call(self, x):
        return x * self.pair[0] + self.pair[1]


class EqualSlots(keras.optimizers.SGD):
    """An optimizer whose state has two variables of one name."""

    def get_updates(self, loss, params):
        super().get_updates(loss, params)
        slots = [keras.backend.zeros((1,), name='v') for _ in range(2)]
        self.weights = self.weights + slots
        self.updates += [keras.backend.update(slot, slot + i + 1) for i, slot in enumerate(slots)]
        return self.updates


def test_weights_of_one_name_come_back(tmp_path, monkeypatch):
    path = str(tmp_path / 'm.h5')
    custom = {'EqualNames': EqualNames, 'EqualSlots': EqualSlots}
    model = keras.Sequential([EqualNames(input_shape=(3,)), Dense(1)])
    model.compile(EqualSlots(), 'mse', mode=QUICK)
    model.train_on_batch(np.ones((6, 3), 'float32'), Y)
    model.save(path)
    copy = keras.models.load_model(path, custom)
    assert len(state(model)) == 4 + 1 + 4 + 2  # weights; iterations, moments, slots
    assert all((a == b).all() for a, b in zip(state(copy), state(model)))
    monkeypatch.setattr(saving, '_uniquify', saving._uniquify.__wrapped__)  # the patch replaces this one of Keras's
    with pytest.raises((TypeError, AttributeError), match='No conversion path|decode'):
        model.save(path)
        keras.models.load_model(path, custom)


def test_names_that_need_several_attributes(tmp_path):
    """HDF5 has 64 KB for an attribute."""
    whole, weights = str(tmp_path / 'm.h5'), str(tmp_path / 'w.h5')
    long = 'x' * 20000
    model = keras.Sequential([Dense(1, input_shape=(1,), name=long + str(i)) for i in range(4)])
    model.save(whole)
    model.save_weights(weights)
    with h5py.File(weights, 'r') as f:
        assert 'layer_names1' in f.attrs
    expected = model.get_weights()
    copies = [keras.models.load_model(whole), keras.models.clone_model(model), keras.models.clone_model(model)]
    for copy, by_name in zip(copies[1:], (False, True)):
        copy.load_weights(weights, by_name=by_name)
    for copy in copies:
        assert all((a == b).all() for a, b in zip(copy.get_weights(), expected))


def test_the_names_alone_can_be_read(trained, tmp_path):
    path = str(tmp_path / 'w.h5')
    trained.save_weights(path)
    with h5py.File(path, 'r') as f:
        assert saving.load_attributes_from_hdf5_group(f, 'layer_names') == [layer.name for layer in trained.layers]


def test_what_keras_does_not_read_from_a_file_stays_text(trained, tmp_path):
    path = str(tmp_path / 'm.h5')
    trained.save(path)
    with h5py.File(path, 'r') as f:
        keras.models.load_model(f)
        assert f.attrs['backend'] == ('theano' if H5PY_3 else b'theano')
    pickled = keras.utils.H5Dict({})
    pickled['name'] = 'text'
    assert pickled['name'] == 'text'


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
            value = f.attrs[key]
            f.attrs[key] = convert(value if isinstance(value, bytes) else value.encode())
    copy = small()
    copy.load_weights(path)
    assert all((a == b).all() for a, b in zip(copy.get_weights(), trained.get_weights()))


@pytest.mark.skipif(not H5PY_3, reason='h5py 2 needs no patch')
def test_without_the_mend_keras_fails(trained, tmp_path, monkeypatch):
    path, weights = str(tmp_path / 'm.h5'), str(tmp_path / 'w.h5')
    trained.save(path)
    trained.save_weights(weights)
    monkeypatch.setattr(h5py.AttributeManager, '__getitem__', h5py.AttributeManager.__getitem__.__wrapped__)
    with pytest.raises(AttributeError, match='decode'):
        keras.models.load_model(path)
    with pytest.raises(AttributeError, match='decode'):
        trained.load_weights(weights)


@pytest.mark.skipif(not H5PY_3, reason='h5py 2 needs no patch')
def test_texts_of_attributes_are_texts_that_can_be_decoded(tmp_path):
    with h5py.File(str(tmp_path / 'a.h5'), 'w') as f:
        f.attrs['one'], f.attrs['number'] = 'a\u00e9', 3
        f.attrs.create('several', ['b', 'c'], dtype=h5py.string_dtype())
        assert f.attrs['one'] == f.attrs['one'].decode('utf8') == f.attrs.get('one').decode() == 'a\u00e9'
        assert [each.decode('utf8') for each in f.attrs['several']] == ['b', 'c'] and f.attrs['number'] == 3
        assert type(pickle.loads(pickle.dumps(f.attrs['one']))) is str
        f.attrs['copy'], f.attrs['copies'] = f.attrs['one'], f.attrs['several']
        assert f.attrs['copy'] == 'a\u00e9' and list(f.attrs['copies']) == ['b', 'c']


@pytest.mark.slow
def test_keras_is_mended_when_somebody_imports_it():
    python('-c', 'import sys, theano_mgpu; assert "keras" not in sys.modules\n'
                 'import keras, h5py; assert hasattr(h5py.AttributeManager.__getitem__, "__wrapped__")')


def test_a_module_that_is_there_is_mended_at_once(monkeypatch):
    module = types.ModuleType('already_there')
    monkeypatch.setitem(sys.modules, 'already_there', module)
    seen = []
    import_hooks.at_import('after', 'already_there', seen.append)
    assert seen == [module]


def test_a_module_is_mended_each_time_that_it_is_executed(tmp_path, monkeypatch):
    """A module is mended also after somebody looked where it is, or after an import that failed."""
    (tmp_path / 'mended_later.py').write_text('import missing_at_first')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'meta_path', list(sys.meta_path))
    seen = []
    import_hooks.at_import('after', 'mended_later', seen.append)
    assert importlib.util.find_spec('mended_later') and not seen
    with pytest.raises(ImportError):
        importlib.import_module('mended_later')
    monkeypatch.setitem(sys.modules, 'missing_at_first', types.ModuleType('missing_at_first'))
    module = importlib.import_module('mended_later')
    assert seen == [module]
    assert importlib.reload(module) is module and seen == [module] * 2
    del sys.modules['mended_later']
