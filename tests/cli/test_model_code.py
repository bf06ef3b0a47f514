"""Bugs that were found and fixed, each under its symptom: code in model files that `theano-mgpu predict` loads."""
import json
import os
import pickle

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.model_file import check_safe, load_model
from theano_mgpu.errors import MgpuError

import h5py
import numpy as np
import pytest
from keras import Input, Model, Sequential, layers
from support import keras_equivalence  # noqa: F401  chooses Keras's backend first
from support import keras_zoo as zoo


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return a folder in which a Lambda layer leaves a file if its code is run."""
    monkeypatch.chdir(tmp_path)


def touching(name='evil'):
    return layers.Lambda(lambda x: (open('ran', 'w').close(), x)[1], output_shape=lambda shape: shape, name=name)


def nested():
    x = Input((4,))
    return Model(x, layers.Dense(2)(Sequential([layers.Dense(3, input_shape=(4,)), touching()])(x)))


MODELS = {
    'sequential': lambda: Sequential([layers.Dense(3, input_shape=(4,)), touching()]),
    'functional': lambda: (lambda x: Model(x, layers.add([x, touching()(x)])))(Input((4,))),
    'nested': nested, 'twice nested': lambda: Sequential([nested()]),
    'in a wrapper': lambda: Sequential([layers.TimeDistributed(touching(), input_shape=(2, 4))]),
    'in a model in a wrapper': lambda: Sequential([layers.TimeDistributed(nested(), input_shape=(2, 4))])}


@pytest.mark.slow_but_with('in a wrapper')
@pytest.mark.parametrize('name', MODELS)
def test_code_in_a_model_is_not_run_with_safe(name):
    """Nothing said that a model with a Lambda layer runs code of its own when it is loaded."""
    MODELS[name]().save('model.h5')
    os.remove('ran')
    with pytest.raises(MgpuError, match='model.h5 is refused by --safe: the Lambda layer evil has code in the file'):
        load_model('model.h5', True)
    assert not os.path.exists('ran')
    assert load_model('model.h5', False).count_params() >= 0 and os.path.exists('ran')


class Touch:
    def __reduce__(self):
        return exec, ("open('ran', 'w').close()",)


def test_pickled_models():
    """A pickled model was "no HDF5 file"; it is read, but with --safe, since reading it may run any code."""
    model = Sequential([layers.Dense(3, input_shape=(4,))])
    for name, thing in ('model.pkl', model), ('touch.pkl', Touch()), ('list.pkl', [model]):
        with open(name, 'wb') as file:
            pickle.dump(thing, file)
        with pytest.raises(MgpuError, match='the model %s is refused by --safe: it is a pickle' % name):
            load_model(name, True)
    assert not os.path.exists('ran')
    np.testing.assert_array_equal(load_model('model.pkl', False).get_weights()[0], model.get_weights()[0])
    with pytest.raises(MgpuError, match='list.pkl is a pickle of the type list, and not of a Keras model'):
        load_model('list.pkl', False)
    with open('cut.pkl', 'wb') as file:
        file.write(pickle.dumps(model)[:-9])
    with pytest.raises(MgpuError, match='Keras cannot load the model cut.pkl'):
        load_model('cut.pkl', False)


def test_custom_classes_and_whatever_else_could_be_called_are_refused():
    def with_layer(layer):
        return {'class_name': 'Sequential', 'config': {'name': 's', 'layers': [layer]}}
    dense = layers.Dense(3, input_shape=(4,), name='dense_7')
    plain = {'class_name': 'Dense', 'config': dense.get_config()}
    check_safe('m.h5', with_layer(plain))
    for kind in ('Mine', 'deserialize', 'Lambda2', 'np', 'K', '', None, 3, ['Dense']):
        with pytest.raises(MgpuError, match='dense_7 has the class'):
            check_safe('m.h5', with_layer(dict(plain, class_name=kind)))
    for key, value in (('kernel_initializer', {'class_name': 'Mine', 'config': {}}),
                       ('kernel_regularizer', {'class_name': 'Mine', 'config': {'name': 'r'}}),
                       ('kernel_constraint', {'class_name': 'deserialize', 'config': {}})):
        with pytest.raises(MgpuError, match='has the class'):
            check_safe('m.h5', with_layer(dict(plain, config=dict(plain['config'], **{key: value}))))
    with pytest.raises(MgpuError, match='dense_7 has code'):
        check_safe('m.h5', with_layer(dict(plain, config=dict(plain['config'], function_type='lambda'))))


def test_the_command(capfd, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'floatX=float32,optimizer=fast_compile,contexts=cli_a->cpu')
    mgpu.init('cli_a->cpu')
    np.save('x.npy', np.ones((3, 4), 'float32'))
    MODELS['nested']().save('model.h5')
    os.remove('ran')
    assert main(['predict', '--safe', 'model.h5', 'x.npy', 'y.npy']) == 2
    assert 'the Lambda layer evil has code in the file' in capfd.readouterr().err
    assert sorted(os.listdir('.')) == ['model.h5', 'x.npy']
    Sequential([layers.Dense(2, input_shape=(4,))]).save('model.h5')
    assert main(['predict', '--safe', 'model.h5', 'x.npy', 'y.npy', '--quiet']) == 0
    with h5py.File('model.h5', 'r+') as file:
        config = json.loads(file.attrs['model_config'])
        file.attrs['model_config'] = b'{"class_name'
    assert main(['predict', '--safe', 'model.h5', 'x.npy', 'y.npy']) == 2
    assert 'cannot load the model model.h5: JSONDecodeError' in capfd.readouterr().err and config
    mgpu.init('host0->cpu')


def test_keras_s_own_layers_pass():
    for make in zoo.MODELS.values():
        made = make[0] if isinstance(make, tuple) else make
        config = json.loads(made().to_json())
        if 'Lambda' not in str(config):
            check_safe('m.h5', config)


class Own(layers.Dense):
    pass


def touched(x):
    return x


def whole(kind=layers.Dense, **options):
    Sequential([kind(3, input_shape=(4,), name='inner', **options)]).save('model.h5')
    with open('model.h5', 'rb') as file:
        return file.read()


def without_weights():
    whole()
    with h5py.File('model.h5', 'r+') as file:
        del file['model_weights']['inner']
    with open('model.h5', 'rb') as file:
        return file.read()


DAMAGES = {'cut in the middle': lambda: whole()[:9000], 'cut at the end': lambda: whole()[:-1], 'empty': lambda: b'',
           'no HDF5 file': lambda: b'a model', 'a part is missing': without_weights,
           'another byte': lambda: whole().replace(b'{"class_name"', b'{\xffclass_name"')}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_model_file_is_not_said_to_have_custom_layers(damage):
    content = DAMAGES[damage]()
    with open('model.h5', 'wb') as file:
        file.write(content)
    with pytest.raises(MgpuError, match='model.h5: .* The file is damaged, cut off, or no HDF5 file') as caught:
        load_model('model.h5', False)
    assert 'custom layers' not in str(caught.value)


@pytest.mark.parametrize('kind, options', [(Own, {}), (layers.Dense, {'activation': touched})])
def test_a_model_file_with_custom_layers_is_not_said_to_be_damaged(kind, options):
    whole(kind, **options)
    with pytest.raises(MgpuError, match='Unknown .* If the model has custom layers') as caught:
        load_model('model.h5', False)
    assert 'damaged' not in str(caught.value)


def test_a_model_file_that_cannot_be_opened_is_not_said_to_be_damaged():
    with pytest.raises(MgpuError, match='does not let this process read the file'):
        load_model('another.h5', False)
