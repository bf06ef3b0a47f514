"""The models and the data of the benchmarks; the tests train them too."""
import os

import theano_mgpu as mgpu  # before theano: installs the version fixes
from theano_mgpu.devices.context_map import default_map

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.signal.pool import pool_2d

MNIST_FILE = os.path.expanduser('~/.keras/datasets/mnist.npz')


def uniform(rng, *shape):
    """Return Glorot's uniform initial weights: shape (inputs, units), or (filters, channels, rows, columns)."""
    receptive = int(np.prod(shape[2:]))
    limit = np.sqrt(6.0 / ((shape[0] + shape[1]) * receptive))
    return rng.uniform(-limit, limit, shape).astype(theano.config.floatX)


def shared(value, name):
    """Return a shared variable on the host."""
    return theano.shared(np.asarray(value, theano.config.floatX), name=name, borrow=True)


class Classifier:
    """A model, its inputs and its loss.

    Attributes
    ----------
    inputs : [x, labels]
        `x` has shape (batch, ...), `labels` (batch,) and dtype int32.
    params : list of SharedVariable
    probabilities : Theano matrix, shape (batch, classes)
    loss, accuracy : Theano scalars, means over the batch
    """

    def __init__(self, x, scores, params):
        labels = T.ivector('labels')
        self.inputs = [x, labels]
        self.params = params
        self.probabilities = T.nnet.softmax(scores)
        self.loss = T.nnet.categorical_crossentropy(self.probabilities, labels).mean()
        self.accuracy = T.eq(T.argmax(self.probabilities, axis=1), labels).mean()


def cnn(seed=0, filters=32, size=28, classes=10):
    """Return a convolution 3x3 with ReLU, max-pooling 2x2, dense softmax; input shape (batch, 1, size, size)."""
    rng = np.random.RandomState(seed)
    pooled = (size - 2) // 2
    w1, b1 = shared(uniform(rng, filters, 1, 3, 3), 'conv.W'), shared(np.zeros(filters), 'conv.b')
    w2 = shared(uniform(rng, filters * pooled ** 2, classes), 'dense.W')
    b2 = shared(np.zeros(classes), 'dense.b')
    x = T.tensor4('x')
    hidden = T.nnet.relu(T.nnet.conv2d(x, w1) + b1.dimshuffle('x', 0, 'x', 'x'))
    hidden = pool_2d(hidden, (2, 2), ignore_border=True).flatten(2)
    return Classifier(x, T.dot(hidden, w2) + b2, [w1, b1, w2, b2])


def mlp(seed=0, sizes=(784, 1024, 1024, 10)):
    """Return dense layers with ReLU, dense softmax; input shape (batch, sizes[0])."""
    rng = np.random.RandomState(seed)
    x = T.matrix('x')
    hidden, params = x, []
    for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
        w, b = shared(uniform(rng, n_in, n_out), 'W%d' % i), shared(np.zeros(n_out), 'b%d' % i)
        params += [w, b]
        hidden = T.dot(hidden if i == 0 else T.nnet.relu(hidden), w) + b
    return Classifier(x, hidden, params)


def lstm(seed=0, n_in=32, units=64, classes=10):
    """Return one LSTM layer (Hochreiter and Schmidhuber, 1997), dense softmax; input shape (batch, steps, n_in)."""
    rng = np.random.RandomState(seed)
    w, u = shared(uniform(rng, n_in, 4 * units), 'lstm.W'), shared(uniform(rng, units, 4 * units), 'lstm.U')
    b, w2, b2 = shared(np.zeros(4 * units), 'lstm.b'), shared(uniform(rng, units, classes), 'W'), \
        shared(np.zeros(classes), 'b')
    x = T.tensor3('x')
    projected = T.dot(x, w).dimshuffle(1, 0, 2) + b

    def step(part, output, cell):
        gates = part + T.dot(output, u)
        i, f, o = (T.nnet.sigmoid(gates[:, k * units:(k + 1) * units]) for k in range(3))
        cell = f * cell + i * T.tanh(gates[:, 3 * units:])
        return o * T.tanh(cell), cell

    start = T.zeros((x.shape[0], units), x.dtype)
    (outputs, _), _ = theano.scan(step, projected, [start, start])
    return Classifier(x, T.dot(outputs[-1], w2) + b2, [w, u, b, w2, b2])


def adam(gradients, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return Adam (Kingma and Ba, 2014) as a Theano updates dict.

    Parameters
    ----------
    gradients : list of Theano variables
    params : list of SharedVariable

    Returns
    -------
    dict of SharedVariable to Theano variable
    """
    one = np.asarray(1, theano.config.floatX)
    t = shared(0, 'adam.t')
    rate = learning_rate * T.sqrt(one - beta2 ** (t + one)) / (one - beta1 ** (t + one))
    updates = {t: t + one}
    for param, gradient in zip(params, gradients):
        zeros = np.zeros_like(param.get_value(borrow=True))
        m, v = shared(zeros, 'adam.m.%s' % param), shared(zeros.copy(), 'adam.v.%s' % param)
        updates[m] = beta1 * m + (1 - beta1) * gradient
        updates[v] = beta2 * v + (1 - beta2) * gradient ** 2
        updates[param] = param - rate * updates[m] / (T.sqrt(updates[v]) + epsilon)
    return {variable: T.cast(value, variable.dtype) for variable, value in updates.items()}


def sgd(gradients, params, learning_rate=0.1):
    """Return stochastic gradient descent as a Theano updates dict; as `adam`."""
    return {param: param - np.asarray(learning_rate, param.dtype) * gradient
            for param, gradient in zip(params, gradients)}


def plain_step(model, updates=adam):
    """Return a training step of plain Theano: ``step(x, labels) -> loss``."""
    pairs = updates(theano.grad(model.loss, model.params), model.params)
    return theano.function(model.inputs, model.loss, updates=list(pairs.items()))


def open_contexts(asked):
    """Open a number of contexts; devices are taken in turn where there are fewer.

    Returns
    -------
    list of Context
    """
    devices = [context.device for context in mgpu.init()]
    if asked <= len(devices):
        return mgpu.init(asked)
    print('%d contexts on %d device%s' % (asked, len(devices), 's' if len(devices) > 1 else ''))
    return mgpu.init(default_map([devices[i % len(devices)] for i in range(asked)]))


def add_keras_arguments(parser, epochs):
    """Add the options that the Keras scripts share."""
    parser.add_argument('--gpus', type=int, default=2, metavar='N', help='contexts to train on; devices are taken in '
                        'turn where there are fewer (default %(default)s)')
    parser.add_argument('--epochs', type=int, default=epochs, help='(default %(default)s)')
    parser.add_argument('--batch-size', type=int, default=128, help='samples in the whole batch (default %(default)s)')


def handwritten_digits(path=None):
    """Return real handwritten digits: MNIST where its file is there, else scikit-learn's scanned digits.

    Parameters
    ----------
    path : str, optional
        An .npz file like Keras's mnist.npz (x_train, y_train, x_test, y_test).

    Returns
    -------
    name : str
        Which data it is.
    train, test : pairs of (images, labels)
        Images of shape (n, 1, 28, 28), floatX in [0, 1]; labels of shape (n,), int32.
    """
    path = path or (MNIST_FILE if os.path.exists(MNIST_FILE) else None)
    if path:
        with np.load(path) as file:
            train, test = [(file['x_' + part], file['y_' + part]) for part in ('train', 'test')]
        name = '%s: %d training and %d test images' % (path, len(train[0]), len(test[0]))
        return name, _prepared(train), _prepared(test)
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits
    digits = load_digits()
    # In whole grey levels, as MNIST's: areas of one grey are then exactly one grey, and max-pooling meets exact
    # ties there instead of ties up to rounding, which would send gradients one way or the other by chance.
    images = np.rint(zoom(digits.images, (1, 3.5, 3.5), order=1) * (255 / 16))
    order = np.random.RandomState(0).permutation(len(images))
    train, test = [(images[part], digits.target[part]) for part in (order[:1500], order[1500:])]
    name = ("scikit-learn's 1,797 scanned digits, scaled to 28x28: 1500 training and 297 test images (MNIST would be "
            'used from %s or --data)' % MNIST_FILE)
    return name, _prepared(train), _prepared(test)


def _prepared(data):
    images, labels = data
    return (images[:, None] / 255.0).astype(theano.config.floatX), labels.astype('int32')
