"""Weights, optimizer states and metrics on several contexts equal plain Keras's on one device, item by item."""
import theano_mgpu  # noqa: F401

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras import regularizers
from keras.constraints import MaxNorm, NonNeg, UnitNorm
from keras.losses import MeanSquaredError
from keras.models import Model, Sequential
from keras.utils.losses_utils import Reduction
from support import keras_zoo as zoo
from support.keras_equivalence import COMPILED, DTYPES, check, compiling, values
from support.keras_zoo import (
    CLASSES,
    COMPILED_MODELS,
    IMAGES,
    MODELS,
    OPTIMIZERS,
    SEQUENCES,
    VECTORS,
    WORDS,
    N,
    dense,
    head,
    images,
    noise,
    one_hot,
    sequences,
    tokens,
    words,
)

pytestmark = pytest.mark.filterwarnings('error::theano_mgpu.MgpuWarning')  # an exact model leads to no warning
SLOW = 'lstm, masking', 'gru, masking', 'conv1d', 'conv2d', 'conv2dtranspose', 'separable'


def named(models):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in models]


@pytest.mark.slow_but_with('add_loss, add_metric-float32')
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


@pytest.mark.slow_but_with('nesterov, decay-float32')
@DTYPES
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizers(name, dtype, contexts):
    check(dense, compiling(name), VECTORS, dtype, contexts)


@pytest.mark.slow_but_with('activity-float32')
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


@pytest.mark.slow_but_with('logcosh')
@pytest.mark.parametrize('loss', LOSSES)
def test_losses(loss, contexts):
    check(dense, compiling('sgd', loss), VECTORS, 'float64', contexts, counts=[2, 3])


@DTYPES
def test_sparse_labels(dtype, contexts):
    data = [[noise(N, 6)], [zoo.labels(N)[:, None]]]
    metrics = ['accuracy', keras.metrics.sparse_top_k_categorical_accuracy]
    check(dense, compiling(loss='sparse_categorical_crossentropy', metrics=metrics), data, dtype, contexts)


@pytest.mark.slow_with('sum-float32', 'none-float32')
@DTYPES
@pytest.mark.parametrize('reduction', [Reduction.SUM, Reduction.SUM_OVER_BATCH_SIZE, Reduction.NONE])
def test_reductions_with_every_regularizer(reduction, dtype, contexts):
    """A sum counts each sample once, and regularisers once, for any number of replicas."""
    check(lambda: dense(kernel_regularizer=regularizers.l2(0.1), activity_regularizer=regularizers.l2(0.01)),
          compiling('sgd', MeanSquaredError(reduction=reduction)), VECTORS, dtype, contexts)


@pytest.mark.slow
@DTYPES
def test_reductions_of_several_outputs(dtype, contexts):
    data = [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]]
    losses = {'kind': keras.losses.CategoricalCrossentropy(reduction=Reduction.SUM), 'place': 'mse'}
    check(zoo.functional, compiling('sgd', losses, metrics=['mae']), data, dtype, contexts)


@pytest.mark.slow_but_with('custom_loss-float32')
@DTYPES
@pytest.mark.parametrize('loss', [zoo.custom_loss, zoo.scalar_loss, zoo.scalar_sum])
def test_custom_losses_and_metrics(loss, dtype, contexts):
    check(dense, compiling(loss=loss, metrics=[zoo.custom_metric, zoo.scalar_sum]), VECTORS, dtype, contexts)


@DTYPES
def test_sample_weights_and_weighted_metrics(dtype, contexts):
    data = VECTORS + [[np.abs(noise(N, seed=5))]]
    check(dense, compiling(weighted_metrics=['accuracy', 'mse'], metrics=['mae']), data, dtype, contexts)


@pytest.mark.slow
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
            M.TrueNegatives(), M.FalsePositives(), M.SensitivityAtSpecificity(0.5, num_thresholds=10),
            M.SpecificityAtSensitivity(0.5, num_thresholds=10), MeanIoU()]


class MeanIoU(keras.metrics.Metric):
    """A metric like keras.metrics.MeanIoU, which needs TensorFlow: a confusion matrix that batches add to."""

    def __init__(self, name='mean_iou', **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight('total', shape=(CLASSES, CLASSES), initializer='zeros')

    def update_state(self, y_true, y_pred, sample_weight=None):
        true = K.one_hot(K.cast(K.argmax(y_true), 'int32'), CLASSES)
        found = K.one_hot(K.cast(K.argmax(y_pred), 'int32'), CLASSES)
        return [K.update_add(self.total, K.dot(K.transpose(true), found))]

    def result(self):
        hits = K.sum(self.total * K.eye(CLASSES))
        return hits / K.sum(self.total)

    def reset_states(self):
        K.set_value(self.total, np.zeros((CLASSES, CLASSES)))


def metrics_of_means():
    from keras import metrics as M
    return [M.CategoricalAccuracy(), M.TopKCategoricalAccuracy(2), M.MeanSquaredError(), M.RootMeanSquaredError(),
            M.CosineSimilarity(), M.KLDivergence(), M.Hinge(), M.SquaredHinge(), M.CategoricalHinge(), M.Poisson(),
            M.LogCoshError(), M.MeanAbsoluteError(), M.MeanAbsolutePercentageError(), M.BinaryCrossentropy(),
            M.MeanSquaredLogarithmicError(), M.CategoricalCrossentropy(), M.BinaryAccuracy(), M.Accuracy()]


@pytest.mark.slow_with('stateful_metrics-float32')
@DTYPES
@pytest.mark.parametrize('metrics', [stateful_metrics, metrics_of_means])
def test_stateful_metrics(metrics, dtype, contexts, interpreted):
    data = [[noise(N, 6)], [one_hot(N)]]
    check(dense, compiling('sgd', metrics=metrics), data, dtype, contexts)


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


# --- Further layers and losses --------------------------------------------------------------------

def tversky_loss(y_true, y_pred, alpha=0.7, smooth=1.):
    true, found = K.flatten(y_true), K.flatten(y_pred)
    hits, missed = K.sum(true * found), K.sum(true * (1 - found))
    wrong = K.sum((1 - true) * found)
    return 1 - (hits + smooth) / (hits + alpha * missed + (1 - alpha) * wrong + smooth)


def segmentation():
    return Sequential([L.Conv2D(3, 3, padding='same', activation='tanh', input_shape=(8, 8, 2)), L.MaxPooling2D(2),
                       L.UpSampling2D(2), L.Conv2D(1, 1, activation='sigmoid')])


def in_the_middle(layer, **options):
    return lambda: Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), layer(), L.Dense(4, **options), head()])


def masked(layer):
    return lambda: Sequential([L.Masking(input_shape=(5, 4)), layer(), head()])


def attention():
    a = L.Input((5, 4))
    states = L.GRU(3, return_sequences=True)(a)
    scores = L.Lambda(lambda s: K.softmax(s, axis=1))(L.Dense(1, use_bias=False)(states))
    context = L.Lambda(lambda pair: K.batch_dot(pair[0], pair[1], axes=[1, 1]),
                       output_shape=(1, 3))([scores, states])
    return Model(a, head()(L.Flatten()(context)))


def self_attention():
    a = L.Input((5, 4))
    query, key, value = [L.Dense(3, use_bias=use_bias)(a) for use_bias in (True, False, True)]
    weights = L.Softmax()(L.Dot(axes=2)([query, key]))
    return Model(a, head()(L.GlobalAveragePooling1D()(L.Dot(axes=[2, 1])([weights, value]))))


MASKS = [[noise(N, 8, 8, 2)], [(noise(N, 8, 8, 1, seed=1) > 0).astype('float64')]]
GAPS = [[noise(N, 5, 4) * (tokens(N, 5) > 0)[:, :, None]], [one_hot(N)]]
# name -> (build, data, arguments of compile); without biases whose gradients are zero but for rounding
FURTHER = {
    'batch normalisation, unscaled': (in_the_middle(lambda: L.BatchNormalization(scale=False)), VECTORS, {}),
    'gaussian noise': (in_the_middle(lambda: L.GaussianNoise(0.5)), VECTORS, {}),
    'gaussian dropout': (in_the_middle(lambda: L.GaussianDropout(0.3)), VECTORS, {}),
    'alpha dropout': (in_the_middle(lambda: L.AlphaDropout(0.3), activation='selu'), VECTORS, {}),
    'spatial dropout': (sequences(lambda: L.SpatialDropout1D(0.4), L.Flatten), SEQUENCES, {}),
    'tversky': (dense, VECTORS, {'loss': tversky_loss}),
    'masking, lstm': (masked(lambda: L.LSTM(3)), GAPS, {}), 'masking, gru': (masked(lambda: L.GRU(3)), GAPS, {}),
    'unrolled': (masked(lambda: L.SimpleRNN(3, unroll=True)), GAPS, {}),
    'two layers, dropout': (words(lambda: L.LSTM(3, return_sequences=True, dropout=0.2, recurrent_dropout=0.2),
                                  lambda: L.GRU(3)), WORDS, {}),
    'bidirectional, masking': (words(lambda: L.Bidirectional(L.LSTM(2))), WORDS, {}),
    'time distributed, masking': (words(lambda: L.TimeDistributed(L.Dense(3)), lambda: L.LSTM(2)), WORDS, {}),
    'masks that reach the loss': (lambda: Sequential([
        L.Embedding(7, 4, mask_zero=True, input_length=5), L.LSTM(3, return_sequences=True),
        L.TimeDistributed(head())]), [WORDS[0], [np.eye(3)[tokens(N, 5, 3)]]], {'metrics': ['accuracy']}),
    'attention': (attention, SEQUENCES, {}), 'self-attention': (self_attention, SEQUENCES, {})}
FURTHER_COMPILED = {
    'convolution, batch normalisation, dropout': (images(
        lambda: L.Conv2D(3, 3, padding='same', use_bias=False), L.BatchNormalization, lambda: L.Activation('tanh'),
        lambda: L.Dropout(0.3), L.MaxPooling2D), IMAGES, {'metrics': ['accuracy']}),
    'channels first': (images(
        lambda: L.Conv2D(3, 3, padding='same', data_format='channels_first', use_bias=False),
        lambda: L.BatchNormalization(axis=1), lambda: L.AveragePooling2D(2, data_format='channels_first')), IMAGES, {}),
    'segmentation by dice': (segmentation, MASKS, {'loss': zoo.dice_loss}),
    'segmentation by tversky': (segmentation, MASKS, {'loss': tversky_loss}),
    'convolutional lstm': (lambda: Sequential([L.ConvLSTM2D(2, 3, input_shape=(3, 5, 5, 1)), L.Flatten(), head()]),
                           [[noise(N, 3, 5, 5, 1)], [one_hot(N)]], {})}


def check_further(build, data, options, contexts, **others):
    def seeded():
        np.random.seed(3)  # of random streams
        return build()
    check(seeded, compiling('nesterov, decay', **options), data, 'float64', contexts, **others)


@pytest.mark.slow_but_with('spatial dropout')
@pytest.mark.parametrize('name', FURTHER)
def test_further_models(name, contexts):
    check_further(*FURTHER[name], contexts)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('name', FURTHER_COMPILED)
def test_further_models_with_convolutions(name, contexts):
    check_further(*FURTHER_COMPILED[name], contexts, mode=COMPILED)
