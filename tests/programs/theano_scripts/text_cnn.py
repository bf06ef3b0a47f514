"""Sentences by a convolutional network over word vectors, in the style of Yoon Kim's CNN_sentence.

usage: text_cnn.py [static|nonstatic]

The convolution is `theano.tensor.nnet.conv`, of a fixed number of images. Word 0 pads sentences: its vector is
set to zero after each step.
"""
import sys
from collections import OrderedDict

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.nnet import conv
from theano.tensor.signal import pool

floatX = theano.config.floatX


def relu(x):
    return T.maximum(0.0, x)


class LeNetConvPoolLayer(object):
    """A convolution over whole word vectors, and the maximum over the sentence."""

    def __init__(self, rng, filter_shape, image_shape, poolsize):
        self.filter_shape, self.image_shape, self.poolsize = filter_shape, image_shape, poolsize
        self.W = theano.shared(np.asarray(rng.uniform(-0.3, 0.3, filter_shape), dtype=floatX), name='W_conv')
        self.b = theano.shared(np.zeros(filter_shape[0], dtype=floatX), name='b_conv')
        self.params = [self.W, self.b]

    def output(self, images, image_shape):
        out = conv.conv2d(input=images, filters=self.W, filter_shape=self.filter_shape, image_shape=image_shape)
        out = T.tanh(out + self.b.dimshuffle('x', 0, 'x', 'x'))
        return pool.pool_2d(out, ws=self.poolsize, ignore_border=True)


def sgd_updates_adadelta(params, cost, rho=0.95, epsilon=1e-6, norm_lim=3, word_vec_name='Words'):
    """Return the updates of Adadelta, with a limit for the norms of columns of weights."""
    updates = OrderedDict()
    for param in params:
        gradient = T.grad(cost, param)
        empty = np.zeros_like(param.get_value())
        total, moved = theano.shared(empty), theano.shared(empty.copy())
        up_total = rho * total + (1 - rho) * T.sqr(gradient)
        updates[total] = up_total
        step = -(T.sqrt(moved + epsilon) / T.sqrt(up_total + epsilon)) * gradient
        updates[moved] = rho * moved + (1 - rho) * T.sqr(step)
        stepped = param + step
        if param.get_value(borrow=True).ndim == 2 and param.name != word_vec_name:
            norms = T.sqrt(T.sum(T.sqr(stepped), axis=0))
            desired = T.clip(norms, 0, T.sqrt(norm_lim))
            updates[param] = stepped * (desired / (1e-7 + norms))
        else:
            updates[param] = stepped
    return updates


def load_data(rng, n, length, n_words):
    """Return padded sentences, with a label in the last column."""
    data = np.zeros((n, length + 1), 'int32')
    for row in data:
        used = rng.randint(4, length - 3)
        row[-1] = rng.randint(2)
        row[2:2 + used] = 1 + rng.randint(0, n_words // 2, used) + row[-1] * (n_words // 2 - 2) * (rng.rand(used) < 0.7)
    return data


def main(how='nonstatic', batch_size=10, n_train=50, n_test=13, length=12, n_words=20, k=4, epochs=3):
    rng = np.random.RandomState(3)
    filter_hs, n_maps = [2, 3], 3
    data = load_data(rng, n_train + n_test, length, n_words)
    train_set, test_set = data[:n_train], data[n_train:]
    U = np.asarray(rng.uniform(-0.25, 0.25, (n_words + 1, k)), dtype=floatX)
    U[0] = 0

    index, x, y = T.lscalar(), T.matrix('x'), T.ivector('y')
    Words = theano.shared(value=U, name='Words')
    zero_vec_tensor = T.vector()
    set_zero = theano.function([zero_vec_tensor], updates=[
        (Words, T.set_subtensor(Words[0, :], zero_vec_tensor))], allow_input_downcast=True, name='set_zero')
    images = Words[T.cast(x.flatten(), dtype='int32')].reshape((x.shape[0], 1, x.shape[1], Words.shape[1]))
    layers, features = [], []
    for filter_h in filter_hs:
        layer = LeNetConvPoolLayer(rng, (n_maps, 1, filter_h, k), (batch_size, 1, length, k),
                                   (length - filter_h + 1, 1))
        layers.append(layer)
        features.append(layer.output(images, layer.image_shape).flatten(2))
    hidden = T.concatenate(features, 1)
    W = theano.shared(np.asarray(0.1 * rng.randn(n_maps * len(filter_hs), 2), dtype=floatX), name='W')
    b = theano.shared(np.zeros(2, dtype=floatX), name='b')
    streams = theano.tensor.shared_randomstreams.RandomStreams(rng.randint(999999))
    dropped = hidden * T.cast(streams.binomial(n=1, p=0.5, size=hidden.shape), floatX)
    p_y_given_x = T.nnet.softmax(T.dot(dropped, W) + b)
    cost = -T.mean(T.log(p_y_given_x)[T.arange(y.shape[0]), y])
    params = [W, b] + sum([layer.params for layer in layers], [])
    if how == 'nonstatic':
        params += [Words]

    x_all = theano.shared(np.asarray(train_set[:, :length], dtype=floatX), borrow=True)
    y_all = T.cast(theano.shared(np.asarray(train_set[:, -1], dtype=floatX), borrow=True), 'int32')
    rows = slice(index * batch_size, (index + 1) * batch_size)
    train_model = theano.function([index], cost, updates=sgd_updates_adadelta(params, cost), givens={
        x: x_all[rows], y: y_all[rows]}, allow_input_downcast=True, name='train_model')

    def predicted(images, image_shape):
        found = [layer.output(images, image_shape).flatten(2) for layer in layers]
        return T.argmax(T.dot(0.5 * T.concatenate(found, 1), W) + b, axis=1)
    val_model = theano.function([index], T.mean(T.neq(predicted(images, layers[0].image_shape), y)), givens={
        x: x_all[rows], y: y_all[rows]}, name='val_model')
    test_model = theano.function([x, y], T.mean(T.neq(predicted(images, None), y)), name='test_model',
                                 allow_input_downcast=True)
    for epoch in range(epochs):
        for minibatch in rng.permutation(n_train // batch_size):
            print('epoch %d, minibatch %d, cost %.10g' % (epoch, minibatch, train_model(minibatch)))
            set_zero(np.zeros(k))
        errors = [val_model(i) for i in range(n_train // batch_size)]
        print('epoch %d, train errors %.10g' % (epoch, np.mean(errors)))
        print('epoch %d, test errors %.10g' % (epoch, test_model(test_set[:, :length], test_set[:, -1])))
    for param in params + [Words]:
        print('%s, mean magnitude %.10g' % (param.name, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main(*sys.argv[1:])
