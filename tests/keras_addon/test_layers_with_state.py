"""BatchNormalization, dropout, and sub-batches that are never too small."""
import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential

from .equivalence import QUICK, TOLERANCE, assert_equal, built, check, everything, floatx, trained, values
from .test_exact import DTYPES, compiling
from .zoo import VECTORS, N, dense, head, noise, one_hot

INEXACT = pytest.mark.filterwarnings('ignore:.*is not exactly as on one:theano_mgpu.MgpuWarning')


def normalised():
    return Sequential([L.BatchNormalization(momentum=0.6, input_shape=(6,)), L.Dense(5, activation='tanh'), head()])


def normalised_twice():
    return Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), L.BatchNormalization(), head()])


@INEXACT
@DTYPES
def test_running_statistics_are_those_of_the_whole_batch(dtype, contexts):
    """By the law of total variance, on ragged batches, also where the mean is large."""
    data = [[50 + noise(N, 6) * np.arange(1, 7)], [one_hot(N)]]

    def compare(model, history):
        return values(model.non_trainable_weights)
    check(normalised, compiling('sgd'), data, dtype, contexts, counts=[2, 3], compare=compare)


@INEXACT
@DTYPES
def test_sub_batches_of_equal_statistics_are_exact(dtype, contexts):
    """Normalisation is per replica: where their statistics agree, so do all weights."""
    x, y = noise(12, 6), one_hot(12)
    halves = [[np.concatenate([v[:6], v[:6], v[6:], v[6:]])] for v in (x, y)]
    check(normalised_twice, compiling(), halves, dtype, contexts, counts=[2], sizes=(12, 12))


def shared_normalisation():
    a, b, normal = L.Input((6,)), L.Input((6,)), L.BatchNormalization()
    return Model([a, b], head()(L.add([normal(a), normal(b)])))


def test_of_a_layer_that_is_used_twice_the_first_update_counts(contexts):
    """As in Keras's own functions."""
    data = [[noise(N, 6), 5 + noise(N, 6, seed=3)], [one_hot(N)]]
    check(shared_normalisation, compiling(), data, 'float64', contexts, counts=[1], sizes=(7, 5, 8))


@INEXACT
def test_no_sub_batch_of_one_sample_is_normalised(contexts):
    """Three samples stay together, whatever the number of contexts; so do two, and one."""
    check(normalised, compiling(), VECTORS, 'float64', contexts, counts=[2, 3], sizes=(3, 2, 3, 3))
    contexts('cpu', 3)
    model = multi_gpu_model(normalised())
    model.compile('sgd', 'categorical_crossentropy', mode=QUICK)
    model._make_train_function()
    forward = model.train_function.function.forward
    sizes = {n: [stop - start for start, stop in forward.rounds(n)[0]] for n in range(1, 8)}
    assert sizes == {1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [3, 2], 6: [2, 2, 2], 7: [3, 2, 2]}


def test_what_normalises_is_named_at_compile(contexts):
    contexts('cpu', 2)
    model = multi_gpu_model(normalised_twice())
    with pytest.warns(mgpu.MgpuWarning, match='layer batch_normalization_.* normalises each sub-batch by its own'):
        model.compile('sgd', 'categorical_crossentropy')


def noisy():
    return Sequential([L.Dense(6, input_shape=(6,)), L.Dropout(0.5), L.GaussianNoise(0.3), head()])


def train(build, n, contexts, seed=3):
    contexts('cpu', n)
    np.random.seed(seed)  # Keras seeds its noise layers from NumPy's
    model = built(build)
    model = multi_gpu_model(model) if n else model
    model.compile('sgd', 'categorical_crossentropy', mode=QUICK)
    return everything(model, trained(model, VECTORS))


def test_noise_on_one_context_is_plain_keras_noise(contexts):
    contexts('cpu', 1)
    results = []
    for wrap in (multi_gpu_model, lambda model: model):
        np.random.seed(3)
        model = wrap(built(noisy))
        model.compile('sgd', 'categorical_crossentropy', mode=QUICK)
        results.append(everything(model, trained(model, VECTORS)))
    assert_equal(*results, TOLERANCE['float32'])


def test_noise_on_two_contexts_is_reproducible(contexts):
    first, again, other = (train(noisy, 2, contexts, seed) for seed in (3, 3, 4))
    assert_equal(first, again, 0)
    assert any(np.abs(a - b).max() > 1e-3 for (_, a), (_, b) in zip(first, other) if np.size(a))


def test_each_replica_drops_other_units(contexts):
    contexts('cpu', 2)
    always = multi_gpu_model(Sequential([L.Lambda(lambda x: K.dropout(x, 0.5, seed=7), input_shape=(50,))]))
    masks = always.predict(np.ones((8, 50)), batch_size=8)
    assert set(np.unique(masks)) == {0, 2} and not (masks[:4] == masks[4:]).all()
    assert not (always.predict(np.ones((8, 50)), batch_size=8) == masks).all()


@pytest.mark.parametrize('n', [1, 2, 3, 4])
def test_batches_smaller_than_the_number_of_contexts(n, contexts):
    contexts('cpu', 4)
    model, plain = multi_gpu_model(built(dense)), built(dense)
    for m in (model, plain):
        m.compile('sgd', 'categorical_crossentropy', mode=QUICK)
    x, y = noise(n, 6), one_hot(n)
    np.testing.assert_allclose(model.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-4)


def test_float64_is_not_lost_on_the_way(contexts):
    with floatx('float64'):
        contexts('cpu', 2)
        model = multi_gpu_model(built(dense))
        model.compile('sgd', 'mse', mode=QUICK)
        assert model.predict(noise(3, 6)).dtype == 'float64'


