"""BatchNormalization, dropout, and batches that are smaller than the number of contexts."""
from theano_mgpu.keras import multi_gpu_model

import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential
from support.keras_equivalence import (
    DTYPES,
    QUICK,
    TOLERANCE,
    assert_equal,
    built,
    check,
    compiling,
    everything,
    floatx,
    trained,
)
from support.keras_zoo import VECTORS, N, dense, head, noise, one_hot


def normalised():
    return Sequential([L.BatchNormalization(momentum=0.6, input_shape=(6,)), L.Dense(5, activation='tanh'), head()])


def normalised_twice():
    return Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), L.BatchNormalization(), head()])


@pytest.mark.slow
@DTYPES
def test_running_statistics_are_those_of_the_whole_batch(dtype, contexts):
    """The statistics, and all other results, are exact on ragged batches, also with a large mean."""
    data = [[50 + noise(N, 6) * np.arange(1, 7)], [one_hot(N)]]
    check(normalised, compiling('sgd'), data, dtype, contexts, counts=[2, 3])


def shared_normalisation():
    a, b, normal = L.Input((6,)), L.Input((6,)), L.BatchNormalization()
    return Model([a, b], head()(L.add([normal(a), normal(b)])))


@pytest.mark.slow
def test_of_a_layer_that_is_used_twice_the_first_update_counts(contexts):
    """Keras's own functions do so, too."""
    data = [[noise(N, 6), 5 + noise(N, 6, seed=3)], [one_hot(N)]]
    check(shared_normalisation, compiling(), data, 'float64', contexts, counts=[1, 2], sizes=(7, 5, 8))


def noisy():
    return Sequential([L.Dense(6, input_shape=(6,)), L.Dropout(0.5), L.GaussianNoise(0.3), head()])


def train(build, n, contexts, seed=3):
    contexts('cpu', n or 1)
    np.random.seed(seed)  # Keras seeds its noise layers from NumPy's
    model = built(build)
    model = multi_gpu_model(model) if n else model
    model.compile('sgd', 'categorical_crossentropy', mode=QUICK)
    return everything(model, trained(model, VECTORS))


@pytest.mark.slow
@pytest.mark.parametrize('n', [1, 2, 3])
def test_noise_is_plain_keras_noise(n, contexts):
    plain, parallel, other = train(noisy, 0, contexts), train(noisy, n, contexts), train(noisy, n, contexts, seed=4)
    assert_equal(parallel, plain, TOLERANCE['float32'])
    assert any(np.abs(a - b).max() > 1e-3 for (_, a), (_, b) in zip(plain, other) if np.size(a))


def test_each_replica_drops_other_units(contexts):
    contexts('cpu', 2)
    always = multi_gpu_model(Sequential([L.Lambda(lambda x: K.dropout(x, 0.5, seed=7), input_shape=(50,))]))
    masks = always.predict(np.ones((8, 50)), batch_size=8)
    assert set(np.unique(masks)) == {0, 2} and not (masks[:4] == masks[4:]).all()
    assert not (always.predict(np.ones((8, 50)), batch_size=8) == masks).all()


def test_float64_is_not_lost_on_the_way(contexts):
    with floatx('float64'):
        contexts('cpu', 2)
        model = multi_gpu_model(built(dense))
        model.compile('sgd', 'mse', mode=QUICK)
        assert model.predict(noise(3, 6)).dtype == 'float64'
