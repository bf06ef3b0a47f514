"""Keras's training step in stages, with statistics of each shard."""
from theano_mgpu.graph.partition import partition

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
