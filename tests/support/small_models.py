"""Small models and helpers of the tests."""
import theano_mgpu  # noqa: F401

import numpy as np
import theano
import theano.tensor as T
from models import Classifier, uniform
from theano.tensor.signal.pool import pool_2d


def data(n, *shape, seed=0, classes=4, dtype='float32'):
    """Return n samples and labels."""
    rng = np.random.RandomState(seed)
    return rng.randn(n, *shape).astype(dtype), rng.randint(0, classes, n).astype('int32')


def shared(value, name, dtype='float32'):
    return theano.shared(np.asarray(value, dtype), name=name)


def dense_model(seed=0, dtype='float32', n_in=7, hidden=9, classes=4):
    """Return a model of two dense layers, smooth everywhere, so that rounding stays rounding over many steps."""
    rng = np.random.RandomState(seed)
    x = T.TensorType(dtype, (False, False))('x')
    w1, b1 = shared(uniform(rng, n_in, hidden), 'w1', dtype), shared(np.zeros(hidden), 'b1', dtype)
    w2, b2 = shared(uniform(rng, hidden, classes), 'w2', dtype), shared(np.zeros(classes), 'b2', dtype)
    model = Classifier(x, T.dot(T.tanh(T.dot(x, w1) + b1), w2) + b2, [w1, b1, w2, b2])
    model.loss = model.loss + np.asarray(1e-3, dtype) * (w1 ** 2).sum()
    return model


def conv_model(seed=0, dtype='float32'):
    """Return a model of convolution, average pooling and a dense layer; smooth everywhere."""
    rng = np.random.RandomState(seed)
    x = T.TensorType(dtype, (False,) * 4)('x')
    w1, b1 = shared(uniform(rng, 3, 2, 3, 3), 'w1', dtype), shared(np.zeros(3), 'b1', dtype)
    w2, b2 = shared(uniform(rng, 27, 4), 'w2', dtype), shared(np.zeros(4), 'b2', dtype)
    hidden = T.tanh(T.nnet.conv2d(x, w1) + b1.dimshuffle('x', 0, 'x', 'x'))
    pooled = pool_2d(hidden, (2, 2), ignore_border=True, mode='average_exc_pad').flatten(2)
    return Classifier(x, T.dot(pooled, w2) + b2, [w1, b1, w2, b2])


def momentum(gradients, params, learning_rate=0.05, momentum=0.9):
    """Return the updates of classical momentum."""
    updates = {}
    for param, gradient in zip(params, gradients):
        velocity = theano.shared(param.get_value() * 0, name='v.%s' % param, broadcastable=param.broadcastable)
        new = np.asarray(momentum, param.dtype) * velocity - np.asarray(learning_rate, param.dtype) * gradient
        updates.update({velocity: new, param: param + new})
    return updates


def largest_relative_difference(model, reference):
    """Return the largest difference of parameters in relation to the largest value."""
    pairs = [(p.get_value(), q.get_value()) for p, q in zip(model.params, reference.params)]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def update_of(step):
    """Return the compiled part in which a training function computes its parameters' new values."""
    return step.executable.parts[step.plan.update[-1]]


def batches(length, size):
    """Return slices of consecutive batches; the last one is ragged."""
    return [slice(start, start + size) for start in range(0, length, size)]


def host_indexing():
    """Return a mode that indexes on the host: a GPU checks indices late, and PoCL not at all."""
    return theano.compile.get_mode(None).excluding('local_gpua_advanced_subtensor1')


def saved_classifier(folder):
    """Write a small compiled model of Keras to the file small.h5 in a folder."""
    from keras.layers import Dense
    from keras.models import Sequential
    model = Sequential([Dense(16, activation='relu', input_shape=(8,)), Dense(3, activation='softmax')])
    model.compile('sgd', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    model.save(str(folder / 'small.h5'))
