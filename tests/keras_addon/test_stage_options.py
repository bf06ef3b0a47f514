"""Keras's training step in stages: statistics of each shard, and random states for each shard."""
from theano_mgpu.graph.partition import partition
from theano_mgpu.graph.random_streams import is_random_state

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Sequential
from support.keras_equivalence import QUICK, floatx
from support.keras_stages import TrainingStep
from support.keras_zoo import head, noise, one_hot
from support.modes import LAZY
from support.stages import n_stages, run, split
from theano.configparser import change_flags

SIZES = (7, 5, 2)


@pytest.fixture(autouse=True)
def quickly():
    with floatx('float64'), change_flags(mode=LAZY):
        yield


def step_of(*layers):
    model = Sequential(list(layers) + [head()])
    model.compile(keras.optimizers.SGD(0.1), 'categorical_crossentropy', mode=QUICK)
    return TrainingStep(model)


def test_local_statistics_cost_no_stage():
    step = step_of(L.Dense(5, input_shape=(6,)), L.BatchNormalization(), L.Activation('tanh'), L.BatchNormalization())
    program = partition(step.inputs, step.outputs, statistics='local')
    assert n_stages(program) == 2
    assert n_stages(partition(step.inputs, step.outputs)) == 6
    n = sum(SIZES)
    data = [noise(n, 6), one_hot(n), np.ones(n)]
    found = dict(zip([v.name for v in step.updated], run(program, split(data, SIZES), QUICK)[len(step.own):]))
    dense, normalise = step.model.layers[:2]
    x = data[0].dot(K.get_value(dense.kernel)) + K.get_value(dense.bias)
    parts = np.split(x, np.cumsum(SIZES)[:-1])
    variance = sum(len(part) * (part.var(axis=0) + 1e-3) for part in parts) / n
    for ours, expected in [(found[normalise.moving_mean.name], 0.01 * x.mean(axis=0)),
                           (found[normalise.moving_variance.name], 0.99 + 0.01 * variance * n / (n - 1.001))]:
        np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize('layer, independent', [
    (lambda **o: L.Dropout(0.3, **o), True), (lambda **o: L.SpatialDropout1D(0.3, **o), True),
    (lambda **o: L.Dropout(0.3, noise_shape=(1, 5, 4), **o), False), (lambda **o: L.GaussianNoise(0.3, **o), False)])
def test_layers_draw_for_their_own_samples(layer, independent):
    step = step_of(layer(input_shape=(5, 4)), L.Flatten())
    program = partition(step.inputs, step.outputs, random='independent')
    states = [v for v in step.updated if is_random_state(v)]
    assert states and set(program.streams) == (set(states) if independent else set())
    n = sum(SIZES)
    data = [noise(n, 5, 4), one_hot(n), np.ones(n)]
    found = run(program, split(data, SIZES), QUICK, [{v: v.get_value() for v in program.streams} for _ in SIZES])
    assert all(np.isfinite(np.asarray(value, float)).all() for value in found)
