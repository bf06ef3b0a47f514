"""Models whose samples depend on each other, or that draw random numbers: 20 steps of training as in plain Keras."""
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
from keras import layers as L
from keras.models import Sequential

from .keras_equivalence import RAGGED, built, everything, trained
from .keras_zoo import (
    contrastive_loss,
    dice_loss,
    f1,
    head,
    labels,
    noise,
    one_hot,
    siamese,
    tokens,
    variational,
    words,
)

SIZES = RAGGED * 4
N = sum(SIZES)
VECTORS = [[noise(N, 6)], [one_hot(N)]]


def dense(*layers):
    return lambda: Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), *[layer() for layer in layers],
                               L.Dense(4, activation='tanh'), head()])


# name -> (build, data, arguments of compile)
MODELS = {
    'batch normalisation': (dense(L.BatchNormalization), VECTORS, {'metrics': ['accuracy']}),
    'dropout': (dense(lambda: L.Dropout(0.4)), VECTORS, {'metrics': ['accuracy']}),
    'both': (dense(L.BatchNormalization, lambda: L.Dropout(0.4)), VECTORS, {'metrics': ['accuracy']}),
    'dice, f1': (dense(), VECTORS, {'loss': dice_loss, 'metrics': [f1]}),
    'lstm with masks': (words(lambda: L.LSTM(3)), [[tokens(N, 5)], [one_hot(N)]], {}),
    'siamese': (siamese, [[noise(N, 6), noise(N, 6, seed=3)], [labels(N)[:, None] % 2]], {'loss': contrastive_loss}),
    'variational': (variational, [[noise(N, 6)], [noise(N, 6)]], {'loss': 'mse'}),
}


def train(name, dtype, mode, gpus=None):
    """Train for 20 ragged steps, without contexts if `gpus` is 0; return losses, metrics, weights, optimizer state."""
    build, data, arguments = MODELS[name]
    data = [[array.astype(dtype) if array.dtype.kind == 'f' else array for array in arrays] for arrays in data]
    np.random.seed(3)  # of random streams
    model = built(build)
    if gpus != 0:
        model = multi_gpu_model(model, gpus=gpus)
    model.compile(**dict({'optimizer': keras.optimizers.SGD(0.05, momentum=0.9), 'loss': 'categorical_crossentropy',
                          'mode': mode}, **arguments))
    return everything(model, trained(model, data, SIZES))
