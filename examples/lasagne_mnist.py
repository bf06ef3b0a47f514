"""Train a Lasagne network on handwritten digits, as Lasagne's own MNIST example does.

The digits come with scikit-learn, and are enlarged. Nothing is downloaded.

Install: ``pip install --no-deps lasagne==0.1``, or Lasagne's master (0.2.dev1) from GitHub.

Run:

    theano-mgpu run examples/lasagne_mnist.py mlp
    theano-mgpu run examples/lasagne_mnist.py cnn
"""
import argparse
import time

import lasagne
import numpy as np
import theano
import theano.tensor as T
from sklearn.datasets import load_digits


def load_dataset():
    """Return images of shape (n, 1, 28, 28), with values from 0 to 1, and labels: for training, validation and test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).repeat(3, axis=2).repeat(3, axis=3)  # 24 x 24 pixels
    images = np.pad(images, [(0, 0), (0, 0), (2, 2), (2, 2)], mode='constant').astype(theano.config.floatX)
    parts = slice(1250), slice(1250, 1500), slice(1500, None)
    return [array[part] for part in parts for array in (images, labels.astype('int32'))]


class BatchNormLayer(lasagne.layers.Layer):
    """Batch normalisation of each channel, for Lasagne 0.1, which has none.

    As in Lasagne 0.2, the new running statistics are default updates of copies of the shared variables. The copies are
    part of the graph, times 0, so that every function over the training output updates the statistics.
    """

    def __init__(self, incoming, alpha=0.1, epsilon=1e-4, **kwargs):
        super().__init__(incoming, **kwargs)
        self.alpha, self.epsilon = alpha, epsilon
        self.axes = tuple(axis for axis in range(len(self.input_shape)) if axis != 1)
        shape = (self.input_shape[1],)
        constant = lasagne.init.Constant
        self.beta = self.add_param(constant(0), shape, name='beta', regularizable=False)
        self.gamma = self.add_param(constant(1), shape, name='gamma')
        self.mean = self.add_param(constant(0), shape, name='mean', trainable=False, regularizable=False)
        self.inv_std = self.add_param(constant(1), shape, name='inv_std', trainable=False, regularizable=False)

    def get_output_for(self, input, deterministic=False, **kwargs):
        mean, inv_std = self.mean, self.inv_std
        if not deterministic:
            mean, inv_std = input.mean(self.axes), T.inv(T.sqrt(input.var(self.axes) + self.epsilon))
            mean, inv_std = self.updating(self.mean, mean), self.updating(self.inv_std, inv_std)
        pattern = ['x', 0] + ['x'] * (input.ndim - 2)
        mean, inv_std, gamma, beta = (v.dimshuffle(pattern) for v in (mean, inv_std, self.gamma, self.beta))
        return (input - mean) * (gamma * inv_std) + beta

    def updating(self, running, statistic):
        """Return the statistic of a batch, with a default update that moves the running statistic towards it."""
        copy = theano.clone(running, share_inputs=False)
        copy.default_update = (1 - self.alpha) * copy + self.alpha * statistic
        return statistic + 0 * copy


def build_mlp(input_var):
    network = lasagne.layers.InputLayer((None, 1, 28, 28), input_var=input_var)
    network = lasagne.layers.DropoutLayer(network, p=0.2)
    for _ in range(2):
        network = lasagne.layers.DenseLayer(network, num_units=100, W=lasagne.init.GlorotUniform(),
                                            nonlinearity=lasagne.nonlinearities.rectify)
        network = lasagne.layers.DropoutLayer(network, p=0.5)
    return lasagne.layers.DenseLayer(network, num_units=10, nonlinearity=lasagne.nonlinearities.softmax)


def build_cnn(input_var):
    network = lasagne.layers.InputLayer((None, 1, 28, 28), input_var=input_var)
    for filters in (8, 16):
        network = lasagne.layers.Conv2DLayer(network, num_filters=filters, filter_size=(5, 5), b=None,
                                             nonlinearity=lasagne.nonlinearities.linear)
        network = getattr(lasagne.layers, 'BatchNormLayer', BatchNormLayer)(network)
        network = lasagne.layers.NonlinearityLayer(network, lasagne.nonlinearities.rectify)
        network = lasagne.layers.MaxPool2DLayer(network, pool_size=(2, 2))
    network = lasagne.layers.DenseLayer(lasagne.layers.dropout(network, p=.5), num_units=64,
                                        nonlinearity=lasagne.nonlinearities.rectify)
    return lasagne.layers.DenseLayer(lasagne.layers.dropout(network, p=.5), num_units=10,
                                     nonlinearity=lasagne.nonlinearities.softmax)


def iterate_minibatches(inputs, targets, batch_size, shuffle=False):
    """Yield batches in a random or in the given order; the last batch is smaller."""
    order = np.random.permutation(len(inputs)) if shuffle else np.arange(len(inputs))
    for start in range(0, len(inputs), batch_size):
        chosen = order[start:start + batch_size]
        yield inputs[chosen], targets[chosen]


def main(model, epochs, batch_size):
    np.random.seed(1)
    lasagne.random.set_rng(np.random.RandomState(1))
    X_train, y_train, X_val, y_val, X_test, y_test = load_dataset()
    input_var, target_var = T.tensor4('inputs'), T.ivector('targets')
    network = {'mlp': build_mlp, 'cnn': build_cnn}[model](input_var)

    prediction = lasagne.layers.get_output(network)
    loss = lasagne.objectives.categorical_crossentropy(prediction, target_var).mean()
    params = lasagne.layers.get_all_params(network, trainable=True)
    learning_rate = theano.shared(np.asarray(0.05, theano.config.floatX), name='learning_rate')
    updates = lasagne.updates.nesterov_momentum(loss, params, learning_rate=learning_rate, momentum=0.9)

    test_prediction = lasagne.layers.get_output(network, deterministic=True)
    test_loss = lasagne.objectives.categorical_crossentropy(test_prediction, target_var).mean()
    test_accuracy = T.mean(T.eq(T.argmax(test_prediction, axis=1), target_var), dtype=theano.config.floatX)

    train_fn = theano.function([input_var, target_var], loss, updates=updates)
    val_fn = theano.function([input_var, target_var], [test_loss, test_accuracy])

    def evaluate(inputs, targets):
        """Return mean loss and accuracy over the samples."""
        totals = sum(len(x) * np.array(val_fn(x, y)) for x, y in iterate_minibatches(inputs, targets, batch_size))
        return totals / len(inputs)

    for epoch in range(epochs):
        began = time.perf_counter()
        losses = [float(train_fn(x, y)) for x, y in iterate_minibatches(X_train, y_train, batch_size, shuffle=True)]
        val_loss, val_accuracy = evaluate(X_val, y_val)
        print('epoch %d of %d: %.1f s, training loss %.4f, validation loss %.4f, validation accuracy %.1f %%' % (
            epoch + 1, epochs, time.perf_counter() - began, np.mean(losses), val_loss, 100 * val_accuracy), flush=True)
        learning_rate.set_value(np.asarray(0.9 * learning_rate.get_value(), theano.config.floatX))
    print('test loss %.4f, test accuracy %.1f %%' % tuple(evaluate(X_test, y_test) * [1, 100]))
    return network


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', nargs='?', choices=['mlp', 'cnn'], default='mlp')
    parser.add_argument('--epochs', type=int, default=4)
    parser.add_argument('--batch-size', type=int, default=100)
    arguments = parser.parse_args()
    main(arguments.model, arguments.epochs, arguments.batch_size)
