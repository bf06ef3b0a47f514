"""Perceptrons and a convolutional network on digits, in the manner of Lasagne's MNIST example.

usage: lasagne_mnist.py [mlp|cnn|custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID] [bn]

With `bn` each layer with weights is batch-normalised. The layers are small ones in the manner of Lasagne's.
"""
import sys
from collections import OrderedDict

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams as RandomStreams
from theano.tensor.signal.pool import pool_2d

rectify, softmax = T.nnet.relu, T.nnet.softmax


def floatX(arr):
    return np.asarray(arr, dtype=theano.config.floatX)


# ---- layers ----

class Layer(object):
    """A layer, which knows the one below it, and the shape of its output."""

    def __init__(self, incoming, name=None):
        self.input_layer = incoming
        self.input_shape = incoming.output_shape
        self.name = name
        self.params = OrderedDict()

    @property
    def output_shape(self):
        return self.get_output_shape_for(self.input_shape)

    def get_output_shape_for(self, input_shape):
        return input_shape

    def add_param(self, value, name, **tags):
        param = theano.shared(floatX(value), name=name)
        tags['trainable'] = tags.get('trainable', True)
        self.params[param] = {tag for tag, is_set in tags.items() if is_set}
        return param


class InputLayer(Layer):
    def __init__(self, shape, input_var):
        self.shape = shape
        self.input_var = input_var
        self.params = OrderedDict()

    @property
    def output_shape(self):
        return self.shape


class DenseLayer(Layer):
    def __init__(self, incoming, num_units, rng, nonlinearity=rectify):
        super(DenseLayer, self).__init__(incoming)
        self.num_units = num_units
        self.nonlinearity = nonlinearity
        num_inputs = int(np.prod(self.input_shape[1:]))
        bound = np.sqrt(6. / (num_inputs + num_units))
        self.W = self.add_param(rng.uniform(-bound, bound, (num_inputs, num_units)), 'W')
        self.b = self.add_param(np.zeros(num_units), 'b')

    def get_output_shape_for(self, input_shape):
        return (input_shape[0], self.num_units)

    def get_output_for(self, input, **kwargs):
        if input.ndim > 2:
            input = input.flatten(2)
        activation = T.dot(input, self.W)
        if self.b is not None:
            activation = activation + self.b
        return self.nonlinearity(activation)


class Conv2DLayer(Layer):
    def __init__(self, incoming, num_filters, filter_size, rng, nonlinearity=rectify):
        super(Conv2DLayer, self).__init__(incoming)
        self.num_filters = num_filters
        self.filter_size = filter_size
        self.nonlinearity = nonlinearity
        self.W_shape = (num_filters, self.input_shape[1]) + filter_size
        bound = np.sqrt(6. / ((self.W_shape[0] + self.W_shape[1]) * np.prod(filter_size)))
        self.W = self.add_param(rng.uniform(-bound, bound, self.W_shape), 'W')
        self.b = self.add_param(np.zeros(num_filters), 'b')

    def get_output_shape_for(self, input_shape):
        return (input_shape[0], self.num_filters) + tuple(
            size - field + 1 for size, field in zip(input_shape[2:], self.filter_size))

    def get_output_for(self, input, **kwargs):
        conved = T.nnet.conv2d(input, self.W, self.input_shape, self.W_shape, subsample=(1, 1), border_mode='valid',
                               filter_flip=True)
        if self.b is not None:
            conved = conved + self.b.dimshuffle('x', 0, 'x', 'x')
        return self.nonlinearity(conved)


class MaxPool2DLayer(Layer):
    def __init__(self, incoming, pool_size):
        super(MaxPool2DLayer, self).__init__(incoming)
        self.pool_size = pool_size

    def get_output_shape_for(self, input_shape):
        return tuple(input_shape[:2]) + tuple(size // pool for size, pool in zip(input_shape[2:], self.pool_size))

    def get_output_for(self, input, **kwargs):
        return pool_2d(input, ws=self.pool_size, stride=self.pool_size, ignore_border=True, pad=(0, 0), mode='max')


class DropoutLayer(Layer):
    def __init__(self, incoming, rng, p=0.5):
        super(DropoutLayer, self).__init__(incoming)
        self._srng = RandomStreams(rng.randint(1, 2147462579))
        self.p = p

    def get_output_for(self, input, deterministic=False, **kwargs):
        if deterministic or self.p == 0:
            return input
        retain_prob = T.constant(1) - self.p
        input /= retain_prob
        mask_shape = self.input_shape
        if any(s is None for s in mask_shape):
            mask_shape = input.shape
        mask = self._srng.binomial(mask_shape, p=retain_prob, dtype=input.dtype)
        return input * mask


class NonlinearityLayer(Layer):
    def __init__(self, incoming, nonlinearity):
        super(NonlinearityLayer, self).__init__(incoming)
        self.nonlinearity = nonlinearity

    def get_output_for(self, input, **kwargs):
        return self.nonlinearity(input)


class BatchNormLayer(Layer):
    def __init__(self, incoming, epsilon=1e-4, alpha=0.1):
        super(BatchNormLayer, self).__init__(incoming)
        self.axes = (0,) + tuple(range(2, len(self.input_shape)))
        self.epsilon = epsilon
        self.alpha = alpha
        shape = [size for axis, size in enumerate(self.input_shape) if axis not in self.axes]
        self.beta = self.add_param(np.zeros(shape), 'beta')
        self.gamma = self.add_param(np.ones(shape), 'gamma')
        self.mean = self.add_param(np.zeros(shape), 'mean', trainable=False)
        self.inv_std = self.add_param(np.ones(shape), 'inv_std', trainable=False)

    def get_output_for(self, input, deterministic=False, **kwargs):
        input_mean = input.mean(self.axes)
        input_inv_std = T.inv(T.sqrt(input.var(self.axes) + self.epsilon))
        if deterministic:
            mean = self.mean
            inv_std = self.inv_std
        else:
            mean = input_mean
            inv_std = input_inv_std
            # A copy has the update: only functions that contain this expression apply the update.
            running_mean = theano.clone(self.mean, share_inputs=False)
            running_inv_std = theano.clone(self.inv_std, share_inputs=False)
            running_mean.default_update = ((1 - self.alpha) * running_mean + self.alpha * input_mean)
            running_inv_std.default_update = ((1 - self.alpha) * running_inv_std + self.alpha * input_inv_std)
            # and makes the copies a part of the expression
            mean += 0 * running_mean
            inv_std += 0 * running_inv_std
        param_axes = iter(range(input.ndim - len(self.axes)))
        pattern = ['x' if input_axis in self.axes else next(param_axes) for input_axis in range(input.ndim)]
        beta = self.beta.dimshuffle(pattern)
        gamma = self.gamma.dimshuffle(pattern)
        mean = mean.dimshuffle(pattern)
        inv_std = inv_std.dimshuffle(pattern)
        return (input - mean) * (gamma * inv_std) + beta


def batch_norm(layer):
    """Normalise the output of a layer before its nonlinearity; its bias becomes the normalisation's."""
    nonlinearity, layer.nonlinearity = layer.nonlinearity, lambda x: x
    del layer.params[layer.b]
    layer.b = None
    return NonlinearityLayer(BatchNormLayer(layer), nonlinearity)


def get_all_layers(layer):
    layers = [layer]
    while not isinstance(layers[0], InputLayer):
        layers.insert(0, layers[0].input_layer)
    return layers


def get_output(layer, **kwargs):
    output = None
    for each in get_all_layers(layer):
        output = each.input_var if isinstance(each, InputLayer) else each.get_output_for(output, **kwargs)
    return output


def get_all_params(layer, **tags):
    return [param for each in get_all_layers(layer) for param, its_tags in each.params.items()
            if all((tag in its_tags) == wanted for tag, wanted in tags.items())]


# ---- updates ----

def sgd(loss_or_grads, params, learning_rate):
    grads = theano.grad(loss_or_grads, params)
    updates = OrderedDict()
    for param, grad in zip(params, grads):
        updates[param] = param - learning_rate * grad
    return updates


def nesterov_momentum(loss_or_grads, params, learning_rate, momentum=0.9):
    updates = sgd(loss_or_grads, params, learning_rate)
    for param in params:
        value = param.get_value(borrow=True)
        velocity = theano.shared(np.zeros(value.shape, dtype=value.dtype), broadcastable=param.broadcastable)
        x = momentum * velocity + updates[param] - param
        updates[velocity] = x
        updates[param] = momentum * x + updates[param]
    return updates


# ---- data, networks, and the loop ----

def load_dataset(n_train=130, n_val=50, n_test=50, size=12):
    rng = np.random.RandomState(42)
    prototypes = rng.uniform(0, 1, (10, 1, size, size))

    def make(n):
        labels = rng.randint(0, 10, n)
        return floatX(prototypes[labels] - 0.5 + 0.3 * rng.randn(n, 1, size, size)), labels.astype(np.int32)

    return make(n_train) + make(n_val) + make(n_test)


def build_mlp(input_var, rng, normalise):
    l_in = InputLayer(shape=(None, 1, 12, 12), input_var=input_var)
    l_in_drop = DropoutLayer(l_in, rng, p=0.2)
    l_hid1 = normalise(DenseLayer(l_in_drop, num_units=32, rng=rng, nonlinearity=rectify))
    l_hid1_drop = DropoutLayer(l_hid1, rng, p=0.5)
    l_hid2 = normalise(DenseLayer(l_hid1_drop, num_units=32, rng=rng, nonlinearity=rectify))
    l_hid2_drop = DropoutLayer(l_hid2, rng, p=0.5)
    return DenseLayer(l_hid2_drop, num_units=10, rng=rng, nonlinearity=softmax)


def build_custom_mlp(input_var, rng, normalise, depth=2, width=32, drop_input=.2, drop_hidden=.5):
    network = InputLayer(shape=(None, 1, 12, 12), input_var=input_var)
    if drop_input:
        network = DropoutLayer(network, rng, p=drop_input)
    for _ in range(depth):
        network = normalise(DenseLayer(network, width, rng=rng, nonlinearity=rectify))
        if drop_hidden:
            network = DropoutLayer(network, rng, p=drop_hidden)
    return DenseLayer(network, 10, rng=rng, nonlinearity=softmax)


def build_cnn(input_var, rng, normalise):
    network = InputLayer(shape=(None, 1, 12, 12), input_var=input_var)
    network = normalise(Conv2DLayer(network, num_filters=8, filter_size=(3, 3), rng=rng, nonlinearity=rectify))
    network = MaxPool2DLayer(network, pool_size=(2, 2))
    network = normalise(Conv2DLayer(network, num_filters=16, filter_size=(2, 2), rng=rng, nonlinearity=rectify))
    network = MaxPool2DLayer(network, pool_size=(2, 2))
    network = normalise(DenseLayer(DropoutLayer(network, rng, p=.2), num_units=48, rng=rng, nonlinearity=rectify))
    return DenseLayer(DropoutLayer(network, rng, p=.2), num_units=10, rng=rng, nonlinearity=softmax)


def iterate_minibatches(inputs, targets, batchsize, rng=None):
    """Yield minibatches, shuffled if there is a generator; the last one takes the rest."""
    assert len(inputs) == len(targets)
    indices = np.arange(len(inputs))
    if rng is not None:
        rng.shuffle(indices)
    for start_idx in range(0, len(inputs), batchsize):
        excerpt = indices[start_idx:start_idx + batchsize]
        yield inputs[excerpt], targets[excerpt]


def main(model='mlp', bn=None, num_epochs=4, batchsize=24):
    rng = np.random.RandomState(1234)
    X_train, y_train, X_val, y_val, X_test, y_test = load_dataset()
    input_var = T.tensor4('inputs')
    target_var = T.ivector('targets')
    normalise = batch_norm if bn == 'bn' else lambda layer: layer
    if model == 'mlp':
        network = build_mlp(input_var, rng, normalise)
    elif model.startswith('custom_mlp'):
        depth, width, drop_in, drop_hid = (model + ':2,24,.2,.5').split(':')[1].split(',')
        network = build_custom_mlp(input_var, rng, normalise, int(depth), int(width), float(drop_in), float(drop_hid))
    elif model == 'cnn':
        network = build_cnn(input_var, rng, normalise)
    else:
        sys.exit('Unrecognized model type %r.' % model)

    prediction = get_output(network)
    loss = T.nnet.categorical_crossentropy(prediction, target_var)
    loss = loss.mean()
    params = get_all_params(network, trainable=True)
    learning_rate = theano.shared(floatX(0.05))
    updates = nesterov_momentum(loss, params, learning_rate=learning_rate, momentum=0.9)

    test_prediction = get_output(network, deterministic=True)
    test_loss = T.nnet.categorical_crossentropy(test_prediction, target_var)
    test_loss = test_loss.mean()
    test_acc = T.mean(T.eq(T.argmax(test_prediction, axis=1), target_var), dtype=theano.config.floatX)

    train_fn = theano.function([input_var, target_var], loss, updates=updates)
    val_fn = theano.function([input_var, target_var], [test_loss, test_acc])

    for epoch in range(num_epochs):
        train_err = 0
        train_batches = 0
        for batch in iterate_minibatches(X_train, y_train, batchsize, rng):
            inputs, targets = batch
            err = train_fn(inputs, targets)
            print('epoch %d, minibatch %d, loss %.10g' % (epoch + 1, train_batches, err))
            train_err += err
            train_batches += 1
        val_err = 0
        val_acc = 0
        val_batches = 0
        for batch in iterate_minibatches(X_val, y_val, batchsize):
            inputs, targets = batch
            err, acc = val_fn(inputs, targets)
            val_err += err
            val_acc += acc
            val_batches += 1
        print('epoch %d, training loss %.10g' % (epoch + 1, train_err / train_batches))
        print('epoch %d, validation loss %.10g' % (epoch + 1, val_err / val_batches))
        print('epoch %d, validation accuracy %.10g %%' % (epoch + 1, val_acc / val_batches * 100))
        learning_rate.set_value(floatX(learning_rate.get_value() * 0.7))

    test_err = 0
    test_acc = 0
    test_batches = 0
    for batch in iterate_minibatches(X_test, y_test, batchsize):
        inputs, targets = batch
        err, acc = val_fn(inputs, targets)
        test_err += err
        test_acc += acc
        test_batches += 1
    print('test loss %.10g' % (test_err / test_batches))
    print('test accuracy %.10g %%' % (test_acc / test_batches * 100))
    for number, param in enumerate(get_all_params(network)):
        print('parameter %d %s, mean magnitude %.10g' % (number, param.name, abs(param.get_value()).mean()))


if __name__ == '__main__':
    main(*sys.argv[1:])
