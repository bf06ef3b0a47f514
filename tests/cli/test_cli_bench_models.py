"""The models of `theano-mgpu bench`, and their synthetic data."""
import theano_mgpu as mgpu
from theano_mgpu.cli.bench import synthetic_models
from theano_mgpu.cli.bench.measure import Trainee

import keras
import numpy as np
import pytest
from keras.layers import LSTM, Dense, Embedding, Input
from keras.models import Model, Sequential


@pytest.fixture(autouse=True)
def own_contexts():
    """Restore the active contexts, which tests change, for other tests."""
    yield
    mgpu.init('host0->cpu')


@pytest.mark.parametrize('name', sorted(set(synthetic_models.MODELS) - {'vgg16', 'resnet50'}))
def test_known_models_fit_their_data(name):
    recipe = synthetic_models.Recipe(name)
    model = recipe.build()
    inputs, targets = recipe.data(model, 3)
    assert [array.shape for array in inputs] == [(3,) + recipe.input_shape]
    assert [array.shape for array in targets] == [(3,) + shape[1:] for shape in [model.output_shape]]


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('name,shape', [('vgg16', (32, 32, 3)), ('resnet50', (32, 32, 3)), ('lstm', (5, 4)),
                                        ('autoencoder', (8, 8, 1)), ('cnn', (12, 12, 1))])
def test_known_models_train(name, shape):
    mgpu.init('bench_a->cpu;bench_b->cpu')
    recipe = synthetic_models.Recipe(name, shape)
    block = Trainee(recipe.replicate(2), recipe, 4).block(1)
    assert block.seconds > 0 and set(block.phases) >= {'run', 'update'}


def test_images_are_smaller_on_a_cpu():
    assert synthetic_models.Recipe('vgg16', gpu=False).input_shape == (64, 64, 3)
    assert synthetic_models.Recipe('vgg16', gpu=True).input_shape == (224, 224, 3)
    assert synthetic_models.Recipe('resnet50', (96, 96, 3), gpu=False).input_shape == (96, 96, 3)


def test_a_file_with_words_two_inputs_and_no_length(tmp_path):
    words, numbers = Input((None,)), Input((4,))
    hidden = keras.layers.concatenate([LSTM(3)(Embedding(7, 2)(words)), numbers])
    Model([words, numbers], [Dense(2)(hidden), Dense(1)(hidden)]).save(str(tmp_path / 'two.h5'))
    recipe = synthetic_models.Recipe(str(tmp_path / 'two.h5'))
    with pytest.raises(mgpu.MgpuError, match=r'has shape \(None,\) without the samples.*e.g. --input-shape 32'):
        recipe.data(recipe.build(), 3)


def test_words(tmp_path):
    Sequential([Embedding(7, 2, input_length=5), LSTM(3), Dense(2)]).save(str(tmp_path / 'words.h5'))
    recipe = synthetic_models.Recipe(str(tmp_path / 'words.h5'))
    model = recipe.build()
    (words,), (targets,) = recipe.data(model, 50)
    assert words.shape == (50, 5) and set(np.unique(words)) == set(range(7)) and targets.shape == (50, 2)
    assert model.loss == 'mse'
