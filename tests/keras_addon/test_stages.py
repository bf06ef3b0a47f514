"""Keras models whose training step is cut into stages train as plain Keras does, whatever the shards."""
import theano_mgpu  # noqa: F401

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras import regularizers
from keras.losses import MeanSquaredError
from keras.models import Model, Sequential
from keras.utils.losses_utils import Reduction
from support import keras_zoo as zoo
from support.keras_equivalence import COMPILED, QUICK, built, floatx
from support.keras_stages import compare
from support.keras_zoo import (
    COMPILED_MODELS,
    MODELS,
    OPTIMIZERS,
    dense,
    head,
    images,
    labels,
    noise,
    one_hot,
    sequences,
    tokens,
)
from support.modes import LAZY
from theano.configparser import change_flags

STEPS, SIZES = 3, (7, 5, 2)
N = STEPS * sum(SIZES)
VECTORS, IMAGES = [[noise(N, 6)], [one_hot(N)]], [[noise(N, 6, 6, 2)], [one_hot(N)]]
SEQUENCES, SENTENCES = [[noise(N, 5, 4)], [one_hot(N)]], [[tokens(N, 5)], [one_hot(N)]]
PAIRS = [[noise(N, 6), noise(N, 6, seed=3)], [labels(N)[:, None] % 2]]
MASKS = [[noise(N, 8, 8, 2)], [(noise(N, 8, 8, 1, seed=1) > 0).astype('float64')]]
CASES = {}


# Others are trained over contexts, in test_exact.py and test_coupled.py, by `make test`.
QUICK_ONES = ['gaussian noise', 'spatial dropout', 'tversky', 'stateful metrics', 'confusion matrix',
              'self-attention']


def case(name, build, data, compiled=False, steps=STEPS, **options):
    """Add a case: a model, its data, and the unusual arguments of compile() and train_on_batch()."""
    marks = [pytest.mark.slow] * (name not in QUICK_ONES) + [pytest.mark.needs_compiler] * compiled
    CASES[name] = pytest.param(build, data, compiled, steps, options, id=name, marks=marks)


def longer(data):
    """Return the data of a model of the zoo for all steps."""
    return [[np.resize(array, (N,) + array.shape[1:]) for array in arrays] for arrays in data]


for name, (build, data) in MODELS.items():
    case(name, build, longer(data), metrics=['accuracy'])
for name, (build, data) in COMPILED_MODELS.items():
    case(name, build, longer(data), compiled=True, metrics=['accuracy'])
for name, make in OPTIMIZERS.items():
    case('optimizer: ' + name, dense, VECTORS, optimizer=make)


def smaller_tail(layer, **options):
    return lambda: Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), layer(), L.Dense(4, **options), head()])


case('batch normalisation, dropout', lambda: Sequential([
    L.Dense(5, input_shape=(6,)), L.BatchNormalization(), L.Activation('tanh'), L.Dropout(0.3),
    L.Dense(4), L.BatchNormalization(), head()]), VECTORS, metrics=['accuracy'])
case('batch normalisation, unscaled', lambda: Sequential([
    L.Dense(5, input_shape=(6,)), L.BatchNormalization(scale=False), head()]), VECTORS)
case('convolution, batch normalisation, dropout', images(
    lambda: L.Conv2D(3, 3, padding='same'), L.BatchNormalization, lambda: L.Activation('tanh'),
    lambda: L.Dropout(0.3), L.MaxPooling2D), IMAGES, compiled=True, metrics=['accuracy'])
case('channels first', images(
    lambda: L.Conv2D(3, 3, padding='same', data_format='channels_first'), lambda: L.BatchNormalization(axis=1),
    lambda: L.AveragePooling2D(2, data_format='channels_first')), IMAGES, compiled=True)
case('gaussian noise', smaller_tail(lambda: L.GaussianNoise(0.5)), VECTORS)
case('gaussian dropout', smaller_tail(lambda: L.GaussianDropout(0.3)), VECTORS)
case('alpha dropout', smaller_tail(lambda: L.AlphaDropout(0.3), activation='selu'), VECTORS)
case('spatial dropout', sequences(lambda: L.SpatialDropout1D(0.4), L.Flatten), SEQUENCES)
case('activity regularizers', lambda: dense(activity_regularizer=regularizers.l1_l2(0.01, 0.02)), VECTORS)
case('weight regularizers', lambda: dense(kernel_regularizer=regularizers.l1_l2(0.01, 0.02)), VECTORS)


# ------------------------------------------------------------------------------------- losses and metrics of a batch

def tversky_loss(y_true, y_pred, alpha=0.7, smooth=1.):
    true, found = K.flatten(y_true), K.flatten(y_pred)
    hits, missed = K.sum(true * found), K.sum(true * (1 - found))
    wrong = K.sum((1 - true) * found)
    return 1 - (hits + smooth) / (hits + alpha * missed + (1 - alpha) * wrong + smooth)


def segmentation():
    return Sequential([L.Conv2D(3, 3, padding='same', activation='tanh', input_shape=(8, 8, 2)), L.MaxPooling2D(2),
                       L.UpSampling2D(2), L.Conv2D(1, 1, activation='sigmoid')])


case('dice', dense, VECTORS, loss=zoo.dice_loss, metrics=[zoo.f1])
case('tversky', dense, VECTORS, loss=tversky_loss)
case('segmentation by dice', segmentation, MASKS, loss=zoo.dice_loss, compiled=True)
case('segmentation by tversky', segmentation, MASKS, loss=tversky_loss, compiled=True)

LOSSES = ['mean_squared_error', 'mean_absolute_error', 'mean_absolute_percentage_error', 'binary_crossentropy',
          'mean_squared_logarithmic_error', 'squared_hinge', 'hinge', 'categorical_hinge', 'logcosh', 'huber_loss',
          'kullback_leibler_divergence', 'poisson', 'cosine_proximity']
for name in LOSSES:
    case('loss: ' + name, dense, VECTORS, loss=name)
case('sparse labels', dense, [VECTORS[0], [labels(N)[:, None]]], loss='sparse_categorical_crossentropy',
     metrics=['accuracy', keras.metrics.sparse_top_k_categorical_accuracy])
for name in (Reduction.SUM, Reduction.NONE):
    case('reduction: ' + name, lambda: dense(activity_regularizer=regularizers.l2(0.01)), VECTORS,
         loss=lambda name=name: MeanSquaredError(reduction=name))
for each in (zoo.custom_loss, zoo.scalar_loss, zoo.scalar_sum):
    case('loss: ' + each.__name__, dense, VECTORS, loss=each, metrics=[zoo.custom_metric, zoo.scalar_sum])


def stateful_metrics():
    from keras import metrics as M
    return [M.Precision(), M.Recall(), M.AUC(num_thresholds=20), M.TruePositives(), M.FalseNegatives(),
            M.TrueNegatives(), M.FalsePositives(), M.SensitivityAtSpecificity(0.5, num_thresholds=10),
            M.SpecificityAtSensitivity(0.5, num_thresholds=10)]


def metrics_of_means():
    from keras import metrics as M
    return [M.CategoricalAccuracy(), M.TopKCategoricalAccuracy(2), M.MeanSquaredError(), M.RootMeanSquaredError(),
            M.CosineSimilarity(), M.KLDivergence(), M.Hinge(), M.SquaredHinge(), M.CategoricalHinge(), M.Poisson(),
            M.LogCoshError(), M.MeanAbsoluteError(), M.MeanAbsolutePercentageError(), M.BinaryCrossentropy(),
            M.MeanSquaredLogarithmicError(), M.CategoricalCrossentropy(), M.BinaryAccuracy(), M.Accuracy()]


class MeanIoU(keras.metrics.Metric):
    """A metric like keras.metrics.MeanIoU, which needs TensorFlow: a confusion matrix that batches add to."""

    def __init__(self, classes, **options):
        super().__init__(name='mean_iou', **options)
        self.classes = classes
        self.total = self.add_weight('total', shape=(classes, classes), initializer='zeros')

    def update_state(self, y_true, y_pred, sample_weight=None):
        true = K.one_hot(K.cast(K.argmax(y_true), 'int32'), self.classes)
        found = K.one_hot(K.cast(K.argmax(y_pred), 'int32'), self.classes)
        return [K.update_add(self.total, K.dot(K.transpose(true), found))]

    def result(self):
        hits = K.sum(self.total * K.eye(self.classes))
        return hits / K.sum(self.total)


case('stateful metrics', dense, VECTORS, metrics=stateful_metrics)
case('metrics of means', dense, VECTORS, metrics=metrics_of_means)
case('confusion matrix', dense, VECTORS, metrics=lambda: [MeanIoU(3)])


# ------------------------------------------------------------------------------------------------ sequences and masks

def masked(layer):
    return lambda: Sequential([L.Masking(input_shape=(5, 4)), layer(), head()])


def with_gaps():
    series = noise(N, 5, 4)
    series[tokens(N, 5) == 0] = 0
    return [[series], [one_hot(N)]]


case('masking, lstm', masked(lambda: L.LSTM(3)), with_gaps())
case('masking, gru', masked(lambda: L.GRU(3)), with_gaps())
case('unrolled', masked(lambda: L.SimpleRNN(3, unroll=True)), with_gaps())
case('two layers, dropout', zoo.words(lambda: L.LSTM(3, return_sequences=True, dropout=0.2, recurrent_dropout=0.2),
                                      lambda: L.GRU(3)), SENTENCES)
case('bidirectional, masking', zoo.words(lambda: L.Bidirectional(L.LSTM(2))), SENTENCES)
case('time distributed, masking', zoo.words(lambda: L.TimeDistributed(L.Dense(3)), lambda: L.LSTM(2)), SENTENCES)
case('stateful', lambda: Sequential([L.LSTM(3, stateful=True, batch_input_shape=(14, 5, 4)), head()]), SEQUENCES)
case('masks that reach the loss', lambda: Sequential([
    L.Embedding(7, 4, mask_zero=True, input_length=5), L.LSTM(3, return_sequences=True), L.TimeDistributed(head())]),
    [SENTENCES[0], [np.eye(3)[tokens(N, 5, 3)]]], metrics=['accuracy'])
case('temporal weights', lambda: Sequential([L.SimpleRNN(3, return_sequences=True, input_shape=(5, 4)),
                                             L.TimeDistributed(L.Dense(2))]),
     [[noise(N, 5, 4)], [noise(N, 5, 2, seed=1)], [np.abs(noise(N, 5, seed=5))]], loss='mse',
     sample_weight_mode='temporal', weighted_metrics=['mae'])
case('convolutional lstm', lambda: Sequential([
    L.ConvLSTM2D(2, 3, input_shape=(3, 5, 5, 1)), L.Flatten(), head()]), [[noise(N, 3, 5, 5, 1)], [one_hot(N)]],
    compiled=True)


def attention():
    a = L.Input((5, 4))
    states = L.GRU(3, return_sequences=True)(a)
    scores = L.Lambda(lambda s: K.softmax(s, axis=1))(L.Dense(1)(states))
    context = L.Lambda(lambda pair: K.batch_dot(pair[0], pair[1], axes=[1, 1]),
                       output_shape=(1, 3))([scores, states])
    return Model(a, head()(L.Flatten()(context)))


def self_attention():
    a = L.Input((5, 4))
    query, key, value = [L.Dense(3)(a) for _ in range(3)]
    weights = L.Softmax()(L.Dot(axes=2)([query, key]))
    return Model(a, head()(L.GlobalAveragePooling1D()(L.Dot(axes=[2, 1])([weights, value]))))


case('attention', attention, SEQUENCES)
case('self-attention', self_attention, SEQUENCES)


# ------------------------------------------------------------------------------------------------------- whole models

def residual(blocks=9):
    """Return a model of nineteen convolutions and a dense layer."""
    def normalised(x):
        return L.BatchNormalization()(L.Conv2D(2, 3, padding='same', use_bias=False)(x))
    x = image = L.Input((8, 8, 2))
    x = L.Activation('tanh')(normalised(x))
    for _ in range(blocks):
        x = L.Activation('tanh')(L.add([x, normalised(L.Activation('tanh')(normalised(x)))]))
    return Model(image, head()(L.GlobalAveragePooling2D()(x)))


case('siamese', zoo.siamese, PAIRS, loss=zoo.contrastive_loss)
case('variational', zoo.variational, [[noise(N, 6)], [noise(N, 6)]], loss='mse')
case('several outputs', zoo.functional, [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]],
     loss={'kind': 'categorical_crossentropy', 'place': 'mse'}, loss_weights={'kind': 0.3, 'place': 2.0},
     metrics={'kind': 'accuracy', 'place': ['mae', 'mse']})
case('sample weights', dense, VECTORS + [[np.abs(noise(N, seed=5))]], weighted_metrics=['accuracy', 'mse'])
case('class weights', dense, VECTORS, class_weight={0: 0.5, 1: 3.0, 2: 1.0})
case('small residual network', lambda: residual(1), [[noise(N, 8, 8, 2)], [one_hot(N)]], compiled=True)
case('residual network', residual, [[noise(N, 8, 8, 2)], [one_hot(N)]], compiled=True)


def prepared(build, options, mode):
    """Return a compiled model, and the arguments of train_on_batch."""
    options = dict(options)
    at_work = {name: options.pop(name) for name in ('class_weight',) if name in options}
    for name in ('metrics', 'loss', 'optimizer'):
        if getattr(options.get(name), '__name__', '') in ('<lambda>', 'stateful_metrics', 'metrics_of_means'):
            options[name] = options[name]()
    np.random.seed(3)  # of random streams
    model = built(build)
    model.compile(**dict(dict(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss='categorical_crossentropy',
                              mode=mode), **options))
    return model, at_work


def batches(data, steps):
    n = sum(SIZES)
    for i in range(steps):
        inputs, targets, *weights = [[array[i * n:(i + 1) * n] for array in arrays] for arrays in data]
        yield (inputs, targets, *[each[0] for each in weights])


def trained_in_stages(build, data, compiled, steps, options):
    mode = COMPILED if compiled else QUICK
    with floatx('float64'), change_flags(mode=COMPILED if compiled else LAZY):
        model, at_work = prepared(build, options, mode)
        return compare(model, list(batches(data, steps)), SIZES, mode, **at_work)


@pytest.mark.parametrize('build, data, compiled, steps, options', list(CASES.values()))
def test_stages_train_as_plain_keras(build, data, compiled, steps, options):
    trained_in_stages(build, data, compiled, steps, options)
