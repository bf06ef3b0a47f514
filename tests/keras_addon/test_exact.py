"""Weights, optimizer states and metrics on several contexts equal plain Keras's on one device, item by item."""
import theano_mgpu  # noqa: F401

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import regularizers
from keras.constraints import MaxNorm, NonNeg, UnitNorm
from keras.losses import MeanSquaredError
from keras.models import Sequential
from keras.utils.losses_utils import Reduction
from support import keras_zoo as zoo
from support.keras_equivalence import COMPILED, DTYPES, check, compiling, values
from support.keras_zoo import COMPILED_MODELS, MODELS, OPTIMIZERS, VECTORS, N, dense, noise, one_hot
from support.parameters import slow_but

pytestmark = pytest.mark.filterwarnings('error::theano_mgpu.MgpuWarning')  # an exact model leads to no warning
SLOW = 'lstm, masking', 'gru, masking', 'conv1d', 'conv2d', 'conv2dtranspose', 'separable'


def named(models):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in models]


@DTYPES
@pytest.mark.parametrize('name', named(MODELS))
def test_models(name, dtype, contexts):
    build, data = MODELS[name]
    check(build, compiling(metrics=['accuracy']), data, dtype, contexts)


@pytest.mark.needs_compiler
@DTYPES
@pytest.mark.parametrize('name', named(COMPILED_MODELS))
def test_models_with_convolutions(name, dtype, contexts):
    build, data = COMPILED_MODELS[name]
    check(build, compiling(metrics=['accuracy']), data, dtype, contexts, mode=COMPILED)


@DTYPES
def test_several_inputs_and_outputs_with_loss_weights(dtype, contexts):
    data = [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]]
    check(zoo.functional, compiling(loss={'kind': 'categorical_crossentropy', 'place': 'mse'},
                                    loss_weights={'kind': 0.3, 'place': 2.0},
                                    metrics={'kind': 'accuracy', 'place': ['mae', 'mse']}), data, dtype, contexts)


@DTYPES
@pytest.mark.parametrize('name', slow_but(['nesterov, decay', 'adam', 'nadam', 'clipnorm'], OPTIMIZERS))
def test_optimizers(name, dtype, contexts):
    check(dense, compiling(name), VECTORS, dtype, contexts)


@DTYPES
@pytest.mark.parametrize('options', [
    {'kernel_constraint': MaxNorm(0.5), 'bias_constraint': NonNeg()}, {'kernel_constraint': UnitNorm()},
    {'kernel_regularizer': regularizers.l1_l2(0.01, 0.02), 'bias_regularizer': regularizers.l2(0.1)},
    {'activity_regularizer': regularizers.l2(0.01)},
    {'activity_regularizer': regularizers.l1(0.01), 'kernel_regularizer': regularizers.l2(0.1)}],
    ids=['max and non-negative', 'unit norm', 'kernel and bias', 'activity', 'activity and kernel'])
def test_constraints_and_regularizers(options, dtype, contexts):
    check(lambda: dense(**options), compiling('nesterov, decay'), VECTORS, dtype, contexts)


LOSSES = ['mean_squared_error', 'mean_absolute_error', 'mean_absolute_percentage_error', 'binary_crossentropy',
          'mean_squared_logarithmic_error', 'squared_hinge', 'hinge', 'categorical_hinge', 'logcosh', 'huber_loss',
          'categorical_crossentropy', 'kullback_leibler_divergence', 'poisson', 'cosine_proximity']
QUICK_LOSSES = 'mean_squared_error', 'hinge', 'logcosh', 'categorical_crossentropy', 'cosine_proximity'


@pytest.mark.parametrize('loss', slow_but(QUICK_LOSSES, LOSSES))
def test_losses(loss, contexts):
    check(dense, compiling('sgd', loss), VECTORS, 'float64', contexts, counts=[2, 3])


@DTYPES
def test_sparse_labels(dtype, contexts):
    data = [[noise(N, 6)], [zoo.labels(N)[:, None]]]
    check(dense, compiling(loss='sparse_categorical_crossentropy', metrics=['accuracy']), data, dtype, contexts)


@DTYPES
@pytest.mark.parametrize('reduction', [Reduction.SUM, Reduction.SUM_OVER_BATCH_SIZE, Reduction.NONE])
def test_reductions_with_every_regularizer(reduction, dtype, contexts):
    """A sum counts each sample once, and regularisers once, for any number of replicas."""
    check(lambda: dense(kernel_regularizer=regularizers.l2(0.1), activity_regularizer=regularizers.l2(0.01)),
          compiling('sgd', MeanSquaredError(reduction=reduction)), VECTORS, dtype, contexts)


@DTYPES
def test_reductions_of_several_outputs(dtype, contexts):
    data = [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]]
    losses = {'kind': keras.losses.CategoricalCrossentropy(reduction=Reduction.SUM), 'place': 'mse'}
    check(zoo.functional, compiling('sgd', losses, metrics=['mae']), data, dtype, contexts)


@DTYPES
@pytest.mark.parametrize('loss', [zoo.custom_loss, zoo.scalar_loss, zoo.scalar_sum])
def test_custom_losses_and_metrics(loss, dtype, contexts):
    check(dense, compiling(loss=loss, metrics=[zoo.custom_metric, zoo.scalar_sum]), VECTORS, dtype, contexts)


@DTYPES
def test_sample_weights_and_weighted_metrics(dtype, contexts):
    data = VECTORS + [[np.abs(noise(N, seed=5))]]
    check(dense, compiling(weighted_metrics=['accuracy', 'mse'], metrics=['mae']), data, dtype, contexts)


@DTYPES
def test_temporal_sample_weights(dtype, contexts):
    data = [[noise(N, 5, 4)], [noise(N, 5, 2, seed=1)], [np.abs(noise(N, 5, seed=5))]]

    def build():
        return Sequential([L.SimpleRNN(3, return_sequences=True, input_shape=(5, 4)), L.TimeDistributed(L.Dense(2))])
    check(build, compiling(loss='mse', sample_weight_mode='temporal', weighted_metrics=['mae']), data, dtype, contexts)


@DTYPES
def test_class_weight(dtype, contexts):
    check(dense, compiling(), VECTORS, dtype, contexts, class_weight={0: 0.5, 1: 3.0, 2: 1.0})


def stateful_metrics():
    from keras import metrics as M
    return [M.Precision(), M.Recall(), M.AUC(num_thresholds=20), M.TruePositives(), M.FalseNegatives(),
            M.SensitivityAtSpecificity(0.5, num_thresholds=10), M.CategoricalAccuracy(), M.MeanSquaredError(),
            M.RootMeanSquaredError(), M.CosineSimilarity(), M.KLDivergence()]


@DTYPES
def test_stateful_metrics(dtype, contexts, interpreted):
    data = [[noise(N, 6)], [one_hot(N)]]
    check(dense, compiling('sgd', metrics=stateful_metrics), data, dtype, contexts)


@DTYPES
def test_frozen_layers(dtype, contexts):
    def build():
        model = dense()
        model.layers[0].trainable = False
        return model
    check(build, compiling(), VECTORS, dtype, contexts)


@pytest.mark.slow
@DTYPES
def test_stateful_rnn(dtype, contexts):
    """Each sample's state stays with it from batch to batch, in training and in prediction."""
    def build():
        return Sequential([L.LSTM(3, stateful=True, batch_input_shape=(6, 5, 4)), zoo.head()])

    def compare(model, history):
        found = [('step %d' % i, values) for i, values in enumerate(history)]
        found += values(model.layers[-2].states)
        found += [('prediction', model.predict(noise(12, 5, 4), batch_size=6))]
        model.reset_states()
        found += [('prediction after reset', model.predict(noise(12, 5, 4), batch_size=6))]
        return found + values(model.weights)
    check(build, compiling('sgd'), zoo.SEQUENCES, dtype, contexts, sizes=(6, 6, 6, 6), compare=compare)
