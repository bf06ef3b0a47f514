"""LeNet in the manner of the Deep Learning Tutorials, with sizes and the batch size written into the graph.

usage: convolutional_mlp.py [--size PIXELS] [--filters N N] [--batch N] [--epochs N] [--train N] [--hidden N]

The defaults take a moment; `--size 28 --filters 20 50 --batch 500 --train 2000 --hidden 500` is the size of the
original.
"""
import argparse

import numpy
import theano
import theano.tensor as T
from logistic_sgd import LogisticRegression, load_data, print_params
from mlp import HiddenLayer
from theano.tensor.nnet import conv2d
from theano.tensor.signal import pool


class LeNetConvPoolLayer(object):
    """Convolution, max-pooling, bias and tanh."""

    def __init__(self, rng, input, filter_shape, image_shape, poolsize=(2, 2)):
        assert image_shape[1] == filter_shape[1]
        self.input = input
        fan_in = numpy.prod(filter_shape[1:])
        fan_out = (filter_shape[0] * numpy.prod(filter_shape[2:]) // numpy.prod(poolsize))
        W_bound = numpy.sqrt(6. / (fan_in + fan_out))
        self.W = theano.shared(
            numpy.asarray(rng.uniform(low=-W_bound, high=W_bound, size=filter_shape), dtype=theano.config.floatX),
            name='W', borrow=True)
        b_values = numpy.zeros((filter_shape[0],), dtype=theano.config.floatX)
        self.b = theano.shared(value=b_values, name='b', borrow=True)
        conv_out = conv2d(input=input, filters=self.W, filter_shape=filter_shape, input_shape=image_shape)
        pooled_out = pool.pool_2d(input=conv_out, ws=poolsize, ignore_border=True)
        self.output = T.tanh(pooled_out + self.b.dimshuffle('x', 0, 'x', 'x'))
        self.params = [self.W, self.b]


def evaluate_lenet5(learning_rate=0.4, n_epochs=3, size=12, nkerns=(4, 6), batch_size=20, n_train=120, n_hidden=16):
    rng = numpy.random.RandomState(23455)
    datasets = load_data(size=size, n_train=n_train, n_valid=2 * batch_size, n_test=2 * batch_size)
    train_set_x, train_set_y = datasets[0]
    valid_set_x, valid_set_y = datasets[1]
    test_set_x, test_set_y = datasets[2]
    n_train_batches = train_set_x.get_value(borrow=True).shape[0] // batch_size
    n_valid_batches = valid_set_x.get_value(borrow=True).shape[0] // batch_size
    n_test_batches = test_set_x.get_value(borrow=True).shape[0] // batch_size

    index = T.lscalar()
    x = T.matrix('x')
    y = T.ivector('y')

    field = 5 if size >= 28 else 3
    layer0_input = x.reshape((batch_size, 1, size, size))
    layer0 = LeNetConvPoolLayer(
        rng,
        input=layer0_input,
        image_shape=(batch_size, 1, size, size),
        filter_shape=(nkerns[0], 1, field, field),
        poolsize=(2, 2)
    )
    size1 = (size - field + 1) // 2
    field1 = 5 if size >= 28 else 2
    layer1 = LeNetConvPoolLayer(
        rng,
        input=layer0.output,
        image_shape=(batch_size, nkerns[0], size1, size1),
        filter_shape=(nkerns[1], nkerns[0], field1, field1),
        poolsize=(2, 2)
    )
    size2 = (size1 - field1 + 1) // 2
    layer2_input = layer1.output.flatten(2)
    layer2 = HiddenLayer(rng, input=layer2_input, n_in=nkerns[1] * size2 * size2, n_out=n_hidden, activation=T.tanh)
    layer3 = LogisticRegression(input=layer2.output, n_in=n_hidden, n_out=10)
    cost = layer3.negative_log_likelihood(y)

    test_model = theano.function(
        [index],
        layer3.errors(y),
        givens={
            x: test_set_x[index * batch_size: (index + 1) * batch_size],
            y: test_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )
    validate_model = theano.function(
        [index],
        layer3.errors(y),
        givens={
            x: valid_set_x[index * batch_size: (index + 1) * batch_size],
            y: valid_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )
    params = layer3.params + layer2.params + layer1.params + layer0.params
    grads = T.grad(cost, params)
    updates = [(param_i, param_i - learning_rate * grad_i) for param_i, grad_i in zip(params, grads)]
    train_model = theano.function(
        [index],
        cost,
        updates=updates,
        givens={
            x: train_set_x[index * batch_size: (index + 1) * batch_size],
            y: train_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )

    for epoch in range(1, n_epochs + 1):
        for minibatch_index in range(n_train_batches):
            cost_ij = train_model(minibatch_index)
            print('epoch %d, minibatch %d, cost %.10g' % (epoch, minibatch_index, cost_ij))
        this_validation_loss = numpy.mean([validate_model(i) for i in range(n_valid_batches)])
        print('epoch %d, validation error %.10g %%' % (epoch, this_validation_loss * 100.))
    test_score = numpy.mean([test_model(i) for i in range(n_test_batches)])
    print('test error %.10g %%' % (test_score * 100.))
    print_params(params)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--size', type=int, default=12, help='width and height of an image')
    parser.add_argument('--filters', type=int, nargs=2, default=[4, 6], help='of the two convolutions')
    parser.add_argument('--batch', type=int, default=20)
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--train', type=int, default=120, help='images to train on')
    parser.add_argument('--hidden', type=int, default=16, help='units of the dense layer')
    args = parser.parse_args()
    evaluate_lenet5(size=args.size, nkerns=args.filters, batch_size=args.batch, n_epochs=args.epochs,
                    n_train=args.train, n_hidden=args.hidden)
