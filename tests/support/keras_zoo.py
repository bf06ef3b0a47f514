"""Models of each kind for which the add-on promises exact results; smooth, so that rounding stays rounding."""
import theano_mgpu  # noqa: F401

import keras
import numpy as np
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential

CLASSES = 3


def noise(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape)


def labels(n, seed=1):
    return np.random.RandomState(seed).randint(0, CLASSES, n)


def one_hot(n, seed=1):
    return np.eye(CLASSES)[labels(n, seed)]


def tokens(n, length, vocabulary=7, seed=2):
    """Return word indices with a padding of zeros."""
    rng = np.random.RandomState(seed)
    words = rng.randint(1, vocabulary, (n, length))
    for row, kept in zip(words, rng.randint(1, length + 1, n)):
        row[kept:] = 0
    return words


N = 24
VECTORS = [[noise(N, 6)], [one_hot(N)]]
IMAGES = [[noise(N, 6, 6, 2)], [one_hot(N)]]
SEQUENCES = [[noise(N, 5, 4)], [one_hot(N)]]
WORDS = [[tokens(N, 5)], [one_hot(N)]]


def head():
    return L.Dense(CLASSES, activation='softmax')


def dense(**options):
    return Sequential([L.Dense(5, activation='tanh', input_shape=(6,), **options), head()])


def functional():
    a, b = L.Input((6,)), L.Input((4,))
    hidden = L.concatenate([L.Dense(5, activation='tanh')(a), L.Dense(3, activation='sigmoid')(b)])
    return Model([a, b], [L.Dense(CLASSES, activation='softmax', name='kind')(hidden),
                          L.Dense(2, name='place')(hidden)])


def shared_layer():
    a, b, encode = L.Input((6,)), L.Input((6,)), L.Dense(4, activation='tanh')
    return Model([a, b], head()(L.multiply([encode(a), encode(b)])))


def nested():
    inner = Sequential([L.Dense(4, activation='tanh', input_shape=(6,)), L.Dense(3, activation='sigmoid')])
    a = L.Input((6,))
    deeper = Model(a, L.add([inner(a), L.Dense(3)(a)]))
    b = L.Input((6,))
    return Model(b, head()(deeper(b)))


def images(*layers):
    return lambda: Sequential([L.InputLayer((6, 6, 2))] + [layer() for layer in layers] + [L.Flatten(), head()])


def sequences(*layers):
    return lambda: Sequential([L.InputLayer((5, 4))] + [layer() for layer in layers] + [head()])


def words(*layers):
    return lambda: Sequential([L.Embedding(7, 4, mask_zero=True, input_length=5)] + [layer() for layer in layers]
                              + [head()])


def added_loss():
    a = L.Input((6,))
    hidden = L.Dense(5, activation='tanh')(a)
    model = Model(a, head()(hidden))
    model.add_loss(0.1 * K.mean(K.square(hidden)))
    model.add_loss(0.01 * K.sum(K.square(hidden)))
    model.add_metric(K.mean(hidden, axis=-1), name='mean_hidden')
    model.add_metric(K.sum(hidden), name='sum_hidden')
    return model


def custom_loss(y_true, y_pred):
    return K.sum(K.square(y_true - y_pred) * K.square(y_pred + 0.5), axis=-1)


def scalar_loss(y_true, y_pred):
    """Return a mean over everything, as many published losses are."""
    return K.mean(K.square(y_true - y_pred))


def scalar_sum(y_true, y_pred):
    """Return a sum over everything, so that sub-batches add up."""
    return K.sum(K.square(y_true - y_pred))


class Unlisted(keras.optimizers.Optimizer):
    """An optimizer with momentum as in many scripts: the velocities are not among its `weights`."""

    def get_updates(self, loss, params):
        velocities = [K.zeros(K.int_shape(param)) for param in params]
        self.updates = []
        for param, velocity, gradient in zip(params, velocities, self.get_gradients(loss, params)):
            new = 0.9 * velocity - 0.05 * gradient
            self.updates += [K.update(velocity, new), K.update(param, param + new)]
        return self.updates

    def get_config(self):
        return {}


def custom_metric(y_true, y_pred):
    return K.mean(K.abs(y_true - y_pred))


def dice_loss(y_true, y_pred):
    return 1 - (2 * K.sum(y_true * y_pred) + 1) / (K.sum(y_true) + K.sum(y_pred) + 1)


def f1(y_true, y_pred):
    hits = K.sum(K.round(K.clip(y_true * y_pred, 0, 1)))
    precision = hits / (K.sum(K.round(K.clip(y_pred, 0, 1))) + K.epsilon())
    recall = hits / (K.sum(K.round(K.clip(y_true, 0, 1))) + K.epsilon())
    return 2 * precision * recall / (precision + recall + K.epsilon())


def siamese():
    a, b = L.Input((6,)), L.Input((6,))
    encode = Sequential([L.Dense(5, activation='tanh', input_shape=(6,)), L.Dense(3)])
    distance = L.Lambda(lambda pair: K.sqrt(K.maximum(K.sum(K.square(pair[0] - pair[1]), axis=1, keepdims=True),
                                                      K.epsilon())))([encode(a), encode(b)])
    return Model([a, b], distance)


def contrastive_loss(y_true, y_pred):
    return K.mean(y_true * K.square(y_pred) + (1 - y_true) * K.square(K.maximum(1 - y_pred, 0)))


def variational():
    x = L.Input((6,))
    hidden = L.Dense(5, activation='tanh')(x)
    mean, log_variance = L.Dense(2)(hidden), L.Dense(2)(hidden)

    def sample(pair):
        return pair[0] + K.exp(pair[1] / 2) * K.random_normal(shape=(K.shape(pair[0])[0], 2))
    found = L.Dense(6)(L.Dense(5, activation='tanh')(L.Lambda(sample)([mean, log_variance])))
    model = Model(x, found)
    model.add_loss(-0.5 * K.mean(K.sum(1 + log_variance - K.square(mean) - K.exp(log_variance), axis=-1)))
    return model


# name -> (build, data)
MODELS = {
    'sequential': (dense, VECTORS),
    'shared layer': (shared_layer, [[noise(N, 6), noise(N, 6, seed=3)], [one_hot(N)]]),
    'nested': (nested, VECTORS),
    'embedding': (lambda: Sequential([L.Embedding(7, 4, input_length=5), L.GlobalAveragePooling1D(), head()]), WORDS),
    'lstm, masking': (words(lambda: L.LSTM(3)), WORDS),
    'gru, masking': (words(lambda: L.GRU(3, reset_after=True)), WORDS),
    'time distributed': (sequences(lambda: L.TimeDistributed(L.Dense(3, activation='tanh')), L.Flatten), SEQUENCES),
    'bidirectional': (sequences(lambda: L.Bidirectional(L.SimpleRNN(2))), SEQUENCES),
    'add_loss, add_metric': (added_loss, VECTORS),
}
# These run convolutions or pool, which need a C++ compiler.
COMPILED_MODELS = {
    'conv1d': (sequences(lambda: L.Conv1D(3, 2, activation='tanh'), lambda: L.MaxPooling1D(2), L.Flatten), SEQUENCES),
    'conv2d': (images(lambda: L.Conv2D(3, 3, activation='tanh', padding='same'), L.AveragePooling2D), IMAGES),
    'conv2dtranspose': (images(lambda: L.Conv2D(3, 3, strides=2, padding='same', activation='tanh'),
                               lambda: L.Conv2DTranspose(2, 3, strides=2, padding='same', activation='tanh')), IMAGES),
    'separable': (images(lambda: L.SeparableConv2D(3, 3, activation='tanh'), L.MaxPooling2D), IMAGES),
}

OPTIMIZERS = {
    'sgd': lambda: keras.optimizers.SGD(0.05),
    'nesterov, decay': lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, decay=0.1),
    'rmsprop': lambda: keras.optimizers.RMSprop(0.01),
    'adagrad': lambda: keras.optimizers.Adagrad(0.01),
    'adadelta': lambda: keras.optimizers.Adadelta(1.0),
    'adam': lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    'amsgrad': lambda: keras.optimizers.Adam(0.01, amsgrad=True, epsilon=1e-3),
    'adamax': lambda: keras.optimizers.Adamax(0.01),
    'nadam': lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3),
    'clipnorm': lambda: keras.optimizers.SGD(0.5, clipnorm=0.1),
    'clipvalue': lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
}
