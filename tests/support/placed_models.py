"""Small models whose parts are placed on devices, and the same models on one device."""
import contextlib
import functools

import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T
from models import adam
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet.bn import batch_normalization_train
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

from .modes import PYTHON

MODELS = {}


class Model:
    """A model; its `loss` and `outputs` are set by one of the functions of `MODELS`.

    Parameters
    ----------
    places : list of (str or Context), optional
        The places that the numbers of `on` stand for; None for a model that is not placed.
    seed : int
        Of the weights.

    Attributes
    ----------
    inputs : list of theano.Variable
        Batches with samples along axis 0.
    params : list of SharedVariable
        Trained weights.
    state : list of SharedVariable
        Other variables that a step changes, without the state of an optimizer.
    batch_updates : dict of SharedVariable to theano.Variable
        New values of some variables of `state`.
    mode : theano.Mode
        A mode in which the model compiles quickly for the host.
    """

    def __init__(self, places=None, seed=0):
        self._places, self._rng = places, np.random.RandomState(seed)
        self.inputs, self.params, self.state = [], [], []
        self.loss, self.outputs, self.batch_updates, self.mode = None, [], {}, PYTHON
        self._draws = []

    def on(self, place):
        """Return a block on the place of a number, or on ``'cpu'``."""
        if self._places is None:
            return contextlib.nullcontext()
        return mgpu.device(place if place == 'cpu' else self._places[place])

    def rows(self, *shape):
        """Return a new input of normally distributed numbers; `shape` is a sample's."""
        found = T.TensorType(theano.config.floatX, (False,) * (1 + len(shape)))('x%d' % len(self.inputs))
        self.inputs.append(found)
        self._draws.append(lambda rng, n: rng.randn(n, *shape).astype(theano.config.floatX))
        return found

    def labels(self, classes):
        """Return a new input of labels."""
        self.inputs.append(T.ivector('labels'))
        self._draws.append(lambda rng, n: rng.randint(0, classes, n).astype('int32'))
        return self.inputs[-1]

    def weight(self, *shape, scale=0.4):
        """Return a new parameter."""
        self.params.append(self.shared(self._rng.randn(*shape) * scale, 'w%d' % len(self.params)))
        return self.params[-1]

    @staticmethod
    def shared(value, name):
        return theano.shared(np.asarray(value, theano.config.floatX), name)

    def dense(self, x, n_in, n_out):
        """Return the outputs of a layer with new weights."""
        return T.tanh(T.dot(x, self.weight(n_in, n_out)) + self.weight(n_out))

    def batch(self, n, seed):
        """Return n samples of each input."""
        rng = np.random.RandomState(seed)
        return [draw(rng, n) for draw in self._draws]


def model(make):
    MODELS[make.__name__] = make
    return make


def squared(output, target):
    return T.sqr(output - target).mean()


@model
def chain(m):
    x, t = m.rows(5), m.rows(3)
    with m.on(0):
        h = m.dense(x, 5, 7)
    with m.on(1):
        y = m.dense(h, 7, 3)
        m.loss = squared(y, t)
    m.outputs = [y]


@model
def chain_of_three(m):
    x, t = m.rows(5), m.rows(3)
    with m.on(0):
        h = m.dense(x, 5, 7)
    with m.on(1):
        h = m.dense(h, 7, 6)
    with m.on(2):
        y = m.dense(h, 6, 3)
        m.loss = squared(y, t)
    m.outputs = [y]


@model
def there_and_back(m):
    """Build a model whose first device has the last layer, too."""
    x, t = m.rows(5), m.rows(3)
    with m.on(0):
        h = m.dense(x, 5, 7)
    with m.on(1):
        h = m.dense(h, 7, 6)
    with m.on(0):
        y = m.dense(h, 6, 3)
        m.loss = squared(y, t)
    m.outputs = [y, h]


@model
def towers(m):
    """Build a model of two inputs, with a tower on each device, merged on the host."""
    left, right, t = m.rows(5), m.rows(4), m.rows(3)
    with m.on(0):
        a = m.dense(left, 5, 6)
    with m.on(1):
        b = m.dense(m.dense(right, 4, 6), 6, 6)
    with m.on('cpu'):
        merged = T.concatenate([a, b], axis=1)
        y = m.dense(merged, 12, 3)
        m.loss = squared(y, t)
    m.outputs = [y, a, b]


@model
def skips(m):
    """Build a model that adds the input and each layer to later layers on other devices."""
    x, t = m.rows(6), m.rows(6)
    with m.on(0):
        first = m.dense(x, 6, 6)
    with m.on(1):
        second = m.dense(first, 6, 6) + x
    with m.on(0):
        third = m.dense(second, 6, 6) + first
    with m.on(1):
        y = m.dense(third, 6, 6) + first * second
        m.loss = squared(y, t)
    m.outputs = [y]


@model
def tied(m):
    """Build an autoencoder whose decoder, on the other device, has the encoder's weight; a weight has no block."""
    x = m.rows(6)
    bias = m.weight(4)
    with m.on(0):
        w = m.weight(6, 4)
        h = T.tanh(T.dot(x, w) + bias)
    with m.on(1):
        y = T.dot(h, w.T) + bias.sum()
        m.loss = squared(y, x)
    m.outputs = [h, y]


@model
def only_parameters_in_blocks(m):
    """Build a model as Lasagne's layers do: parameters in blocks, and the graph outside of any."""
    x, t = m.rows(5), m.rows(3)
    with m.on(0):
        w, b = m.weight(5, 7), m.weight(7)
    with m.on(1):
        w2, b2 = m.weight(7, 3), m.weight(3)
    h = T.tanh(T.dot(x, w) + b)
    y = T.dot(h, w2) + b2
    m.loss = squared(y, t)
    m.outputs = [y, h]


@model
def several_losses(m):
    """Build a model of two losses on two devices with a metric each; weights of both devices are penalised."""
    x, z, t, labels = m.rows(5), m.rows(5), m.rows(3), m.labels(4)
    with m.on(0):
        h = m.dense(x + z, 5, 7)
        first = squared(m.dense(h, 7, 3), t)
        largest = abs(h).max()
    with m.on(1):
        p = T.nnet.softmax(T.dot(m.dense(h, 7, 6), m.weight(6, 4)))
        second = -T.log(p[T.arange(labels.shape[0]), labels]).mean()
        right = T.eq(T.argmax(p, axis=1), labels).mean()
    m.loss = first + 0.5 * second + 0.01 * sum(T.sqr(w).sum() for w in m.params)
    m.outputs = [first, second, p, largest, right]


@model
def dropout(m):
    """Build a model with a stream of each kind, and a draw of each on either device."""
    x, t = m.rows(5), m.rows(3)
    streams, others = MRG_RandomStreams(5), RandomStreams(6)

    def masked(h, draws):
        mask = draws.binomial(size=h.shape, n=1, p=0.7, dtype=theano.config.floatX)
        return h * mask
    with m.on(0):
        h = masked(masked(m.dense(x, 5, 7), streams), others)
    with m.on(1):
        h = masked(masked(m.dense(h, 7, 6), streams), others)
        y = m.dense(h, 6, 3)
        m.loss = squared(y, t)
    m.outputs = [y]
    m.state += [update[0] for update in streams.state_updates + others.state_updates]


@model
def batch_normalised(m):
    """Build a model with running means and variances, on both devices."""
    x, t = m.rows(5), m.rows(3)

    def normalised(h, n):
        mean, variance = m.shared(np.zeros(n), 'mean'), m.shared(np.ones(n), 'variance')
        out, _, _, new_mean, new_variance = batch_normalization_train(
            h, m.weight(n) + 1, m.weight(n), running_mean=mean, running_var=variance)
        m.batch_updates.update({mean: T.cast(new_mean, h.dtype), variance: T.cast(new_variance, h.dtype)})
        m.state += [mean, variance]
        return out
    with m.on(0):
        h = normalised(m.dense(x, 5, 7), 7)
    with m.on(1):
        h = normalised(m.dense(h, 7, 6), 6)
        y = m.dense(h, 6, 3)
        m.loss = squared(y, t)
    m.outputs = [y]


@model
def recurrent(m):
    """Build a model with a scan on one device, and a reader of its last state on the other one."""
    x, t = m.rows(4, 5), m.rows(3)
    with m.on(0):
        w, v = m.weight(5, 6), m.weight(6, 6)
        h, _ = theano.scan(lambda now, before: T.tanh(T.dot(now, w) + T.dot(before, v)),
                           x.dimshuffle(1, 0, 2), T.zeros((x.shape[0], 6)))
    with m.on(1):
        y = m.dense(h[-1] + h.mean(axis=0), 6, 3)
        m.loss = squared(y, t)
    m.outputs = [y]


@model
def two_loops(m):
    """Build a scan on one device, and on the other one a scan over its steps that reads its last step each time."""
    x, t = m.rows(4, 5), m.rows(5)
    with m.on(0):
        w, begin = m.weight(5), T.zeros((x.shape[0], 5))
        h, _ = theano.scan(lambda now, before: T.tanh(now * w + before), x.dimshuffle(1, 0, 2), begin)
    with m.on(1):
        last, u = h[-1], m.weight(5)
        k, _ = theano.scan(lambda now, before: T.tanh(now * u + before * last), h, T.zeros((x.shape[0], 5)))
        m.loss = squared(k[-1], t)
    m.outputs = [k[-1]]


@model
def convolutional(m):
    x, labels = m.rows(2, 6, 6), m.labels(4)
    m.mode = theano.Mode('c|py', 'fast_compile')  # a convolution cannot be interpreted
    with m.on(0):
        h = T.tanh(T.nnet.conv2d(x, m.weight(3, 2, 3, 3)) + m.weight(3).dimshuffle('x', 0, 'x', 'x'))
        h = pool_2d(h, (2, 2), ignore_border=True, mode='average_exc_pad')
    with m.on(1):
        p = T.nnet.softmax(T.dot(h.flatten(2), m.weight(12, 4)))
        m.loss = T.nnet.categorical_crossentropy(p, labels).mean()
    m.outputs = [p]


def clipped_adam(gradients, params):
    """Return Adam's updates, with one step count, for gradients that are clipped by their global norm."""
    norm = T.sqrt(sum(T.sqr(gradient).sum() for gradient in gradients))
    scale = T.minimum(1, 0.5 / norm)
    return adam([gradient * scale for gradient in gradients], params, learning_rate=0.01, epsilon=1e-4)


def made(name, places=None, **options):
    """Return the Model of a name."""
    m = Model(places, **options)
    MODELS[name](m)
    m.loss = T.cast(m.loss, theano.config.floatX)
    return m


class Training:
    """A training of a model, placed or not, and its results.

    Parameters
    ----------
    m : Model
    how : {'theano', 'function', 'training_function'}
        The function that compiles the step.
    updates : callable
        Of gradients and parameters.
    options
        Arguments of `mgpu.function` or `mgpu.training_function`.

    Attributes
    ----------
    step : callable
    variables : list of SharedVariable
        Parameters, state of the optimizer and of the model.
    """

    def __init__(self, m, how='theano', updates=clipped_adam, **options):
        self.model, made_of = m, {}
        options.setdefault('mode', m.mode)

        def noted(gradients, params):
            made_of.update(updates(gradients, params))
            return made_of
        if how == 'training_function':
            self.step = mgpu.training_function(m.inputs, m.loss, m.params, noted, m.outputs,
                                               batch_updates=m.batch_updates, **options)
        else:
            function = theano.function if how == 'theano' else mgpu.function
            new = {**noted(T.grad(m.loss, m.params), m.params), **m.batch_updates}
            self.step = function(m.inputs, [m.loss] + m.outputs, updates=list(new.items()), on_unused_input='ignore',
                                 **options)
        self.variables = m.params + [v for v in made_of if v not in m.params] + m.state

    def run(self, sizes, first=0):
        """Return the outputs of a step for each size of a batch."""
        return [[np.asarray(value) for value in self.step(*self.model.batch(n, 100 + first + i))]
                for i, n in enumerate(sizes)]

    def values(self):
        return [value_of(variable) for variable in self.variables]


def value_of(variable):
    value = variable.get_value()
    return value.get_state()[1] if isinstance(value, np.random.RandomState) else np.asarray(value)


@functools.lru_cache(maxsize=None)
def plain(name, sizes, dtype):
    """Return the outputs of each step of plain Theano on one device, and the values afterwards."""
    with theano.configparser.change_flags(floatX=dtype):
        training = Training(made(name))
        return training.run(sizes), training.values()


def assert_close(ours, theirs, about=''):
    """Check that values are equal to rounding, in relation to the largest one."""
    tolerance = 1e-9 if theano.config.floatX == 'float64' else 1e-5
    assert len(ours) == len(theirs)
    for i, (found, expected) in enumerate(zip(ours, theirs)):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        largest = max(1e-3, abs(expected).max(initial=0))
        np.testing.assert_allclose(found, expected, tolerance, tolerance * largest, err_msg='%s, value %d' % (about, i))


def check(training, name, sizes):
    """Train, and compare all outputs, and the values afterwards, with plain Theano on one device."""
    outputs, values = plain(name, sizes, theano.config.floatX)
    for i, (ours, theirs) in enumerate(zip(training.run(sizes), outputs)):
        assert_close(ours, theirs, about='step %d of %s' % (i, name))
    assert_close(training.values(), values, about='after the steps of %s' % name)
