"""Train a small convolutional network on noisy images of ten kinds. The script is plain Theano, and knows one device.

`make demo` runs it twice: as it is, and on all devices, with ``theano-mgpu run examples/train.py``. The network has two
convolutions of 16 and 32 filters of 5x5, each with ReLU and 2x2 max-pooling, and a softmax layer; the images have
28x28 pixels. Usage: train.py [EPOCHS]
"""
import sys
import time

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.signal.pool import pool_2d

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
BATCH, BATCHES = 128, 20
rng = np.random.RandomState(0)
floatX = theano.config.floatX


def weights(name, *shape):
    scale = np.sqrt(2 / np.prod(shape[1:]))  # He et al., 2015
    return theano.shared((scale * rng.standard_normal(shape)).astype(floatX), name)


def biases(name, size):
    return theano.shared(np.zeros(size, floatX), name)


def layer(images, W, b):
    return pool_2d(T.nnet.relu(T.nnet.conv2d(images, W) + b.dimshuffle('x', 0, 'x', 'x')), (2, 2), ignore_border=True)


kinds = rng.standard_normal((10, 1, 28, 28))
labels = rng.randint(0, len(kinds), BATCH * BATCHES).astype('int32')
images = (kinds[labels] + 2 * rng.standard_normal((len(labels), 1, 28, 28))).astype(floatX)

W1, b1 = weights('W1', 16, 1, 5, 5), biases('b1', 16)
W2, b2 = weights('W2', 32, 16, 5, 5), biases('b2', 32)
W3, b3 = weights('W3', 10, 32 * 4 * 4), biases('b3', 10)
x, y = T.tensor4('x'), T.ivector('y')
probabilities = T.nnet.softmax(T.dot(layer(layer(x, W1, b1), W2, b2).flatten(2), W3.T) + b3)
loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
updates = [(p, p - np.asarray(0.02, floatX) * T.grad(loss, p)) for p in (W1, b1, W2, b2, W3, b3)]
train = theano.function([x, y], loss, updates=updates, name='train')

for epoch in range(1, EPOCHS + 1):
    began, order = time.perf_counter(), rng.permutation(len(images)).reshape(BATCHES, BATCH)
    losses = [train(images[batch], labels[batch]) for batch in order]
    print('epoch %2d: loss %.8f, %.2f s' % (epoch, np.mean(losses), time.perf_counter() - began), flush=True)
