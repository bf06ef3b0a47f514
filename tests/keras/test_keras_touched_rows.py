"""Embeddings of Keras, whose gradients are exchanged by rows: the weights and the state of plain Keras."""
from theano_mgpu.graph.analysis import touched_rows
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from keras import layers
from keras.models import Model, Sequential
from support.parameters import slow_but
from theano.configparser import change_flags

WORDS, LENGTH, SAMPLES = 80, 6, 21


def words():
    return layers.Input((LENGTH,), dtype='int32')


def softmax(hidden):
    return layers.Dense(3, activation='softmax')(hidden)


def masked():
    return Sequential([layers.Embedding(WORDS, 5, mask_zero=True, input_length=LENGTH), layers.LSTM(4),
                       layers.Dense(3, activation='softmax')])


def shared():
    pair, embedding, mean = [words(), words()], layers.Embedding(WORDS, 5), layers.GlobalAveragePooling1D()
    return Model(pair, softmax(layers.concatenate([mean(embedding(each)) for each in pair])))


def time_distributed():
    sentences = layers.Input((2, LENGTH), dtype='int32')
    return Model(sentences, softmax(layers.Flatten()(layers.TimeDistributed(layers.Embedding(WORDS, 5))(sentences))))


def convolved():
    embedding = layers.Embedding(WORDS, 5, input_length=LENGTH, embeddings_regularizer='l2',
                                 embeddings_constraint=keras.constraints.max_norm(1.))
    return Sequential([embedding, layers.Conv1D(4, 3), layers.GlobalMaxPooling1D(),
                       layers.Dense(3, activation='softmax')])


def matrix_factorisation():
    """Return the model of He et al., 2017: two tables of users, and two of items."""
    pair = [layers.Input((1,), dtype='int32') for _ in range(2)]
    vectors = [layers.Flatten()(layers.Embedding(WORDS, 5)(each)) for each in pair]
    others = [layers.Flatten()(layers.Embedding(WORDS, 3)(each)) for each in pair]
    hidden = layers.Dense(4, activation='relu')(layers.concatenate(others))
    return Model(pair, softmax(layers.concatenate([layers.multiply(vectors), hidden])))


MODELS = masked, shared, time_distributed, convolved, matrix_factorisation
OPTIMIZERS = {'adam': keras.optimizers.Adam, 'clipped': lambda: keras.optimizers.SGD(.1, clipnorm=.1)}


def trained(make, optimizer, divided):
    """Return the weights, the state of the optimizer and the losses after two epochs with a ragged batch each."""
    np.random.seed(3)
    model = make()
    trainer = multi_gpu_model(model) if divided else model
    trainer.compile(OPTIMIZERS[optimizer](), 'sparse_categorical_crossentropy')
    rng = np.random.RandomState(5)
    x = [rng.randint(0, WORDS, (SAMPLES, *each.shape[1:])) for each in
         [np.empty((1, *shape._keras_shape[1:])) for shape in model.inputs]]
    history = trainer.fit(x, rng.randint(0, 3, SAMPLES), batch_size=4, epochs=2, verbose=0, shuffle=False)
    return [*model.get_weights(), *trainer.optimizer.get_weights(), np.array(history.history['loss'])]


@pytest.mark.slow_with('shared-adam')
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('make', slow_but([shared], MODELS), ids=lambda make: make.__name__)
def test_embeddings(make, optimizer, cpu2, monkeypatch):
    monkeypatch.setattr(touched_rows, 'LARGE', 0)
    before = keras.backend.floatx()
    keras.backend.set_floatx('float64')
    try:
        with change_flags(floatX='float64'):
            for found, expected in zip(trained(make, optimizer, True), trained(make, optimizer, False)):
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * abs(expected).max())
    finally:
        keras.backend.set_floatx(before)
