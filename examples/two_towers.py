"""Place a model on two devices: a tower of layers on each, merged on the host. Compare it with one device.

Two towers read two inputs, such as a picture and a text. Here the inputs are the upper and the lower half of
scikit-learn's digits. Each tower is on a device of its own, so both together may be larger than one device. The merge,
a concatenation and a small layer, is on the host:

    with mgpu.device('dev0'): a = tower(x)
    with mgpu.device('dev1'): b = tower(z)
    with mgpu.device('cpu'):  y = output(concatenate([a, b]))

Gradients, updates and the state of the optimizer are on the devices of their parameters. The script trains the model,
and with plain Theano the same model on one device, from the same weights. It prints the largest differences, and exits
with code 1 if the differences are more than rounding.

Run:

    python examples/two_towers.py
    python examples/two_towers.py --contexts 'dev0->cuda0;dev1->cuda1' --micro-batches 4
    THEANO_FLAGS=floatX=float64 python examples/two_towers.py --contexts 'dev0->cpu;dev1->cpu'
"""
import argparse
import contextlib
import sys
from collections import Counter

import theano_mgpu as mgpu  # before theano

import numpy as np
import theano
import theano.tensor as T
from sklearn.datasets import load_digits

HELP = {
    'contexts': 'devices to use, as "NAME->DEVICE;NAME->DEVICE"; the first tower is on the first device, the second '
                'tower on the second. Default: two of the devices that `theano-mgpu devices` lists',
    'steps': 'training steps (default: %(default)s)',
    'batch': 'samples of a batch; the last batch has one less (default: %(default)s)',
    'micro-batches': 'slices of a batch: while one device computes a slice, the other device computes the next slice. '
                     'The result is the same as for the whole batch (default: %(default)s)',
    'recompute': 'compute the forward pass again in the backward pass: less memory, more time',
}
HALF, HIDDEN, CLASSES = 32, 64, 10


class TwoTowers:
    """The model. `places` are two contexts, or None for one device."""

    def __init__(self, places=None):
        self.places, self.rng, self.params = places, np.random.RandomState(0), []
        x, z, labels = self.inputs = T.matrix('x'), T.matrix('z'), T.ivector('labels')
        with self.on(0):
            a = self.tower(x)
        with self.on(1):
            b = self.tower(z)
        with self.on('cpu'):
            self.output = T.nnet.softmax(self.dense(T.concatenate([a, b], axis=1), 2 * HIDDEN, CLASSES))
            self.loss = T.nnet.categorical_crossentropy(self.output, labels).mean()

    def on(self, place):
        if self.places is None:
            return contextlib.nullcontext()
        return mgpu.device(place if place == 'cpu' else self.places[place])

    def tower(self, x):
        return T.tanh(self.dense(T.tanh(self.dense(x, HALF, HIDDEN)), HIDDEN, HIDDEN))

    def dense(self, x, n_in, n_out):
        w = self.shared(self.rng.randn(n_in, n_out) / np.sqrt(n_in), 'w%d' % len(self.params))
        b = self.shared(np.zeros(n_out), 'b%d' % len(self.params))
        self.params += [w, b]
        return T.dot(x, w) + b

    @staticmethod
    def shared(value, name):
        return theano.shared(np.asarray(value, theano.config.floatX), name)


def momentum(gradients, params):
    """Return the updates of gradient descent with momentum."""
    updates = []
    for param, gradient in zip(params, gradients):
        velocity = theano.shared(param.get_value() * 0, 'velocity of %s' % param)
        new = T.cast(0.9 * velocity - 0.1 * gradient, param.dtype)
        updates += [(velocity, new), (param, param + new)]
    return updates


def batches(steps, size):
    """Yield the upper half of each image, shape (n, 32), the lower half, and labels, shape (n,)."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(theano.config.floatX)
    for i in range(steps):
        start = i * size % (len(images) - size)
        chosen = slice(start, start + size - (i == steps - 1))
        yield images[chosen, :HALF], images[chosen, HALF:], labels[chosen].astype('int32')


def difference(ours, theirs):
    """Return the largest difference, relative to the largest value."""
    return max(float(abs(np.asarray(a) - b).max() / abs(b).max()) for a, b in zip(ours, theirs))


def main(contexts, steps, batch, micro_batches, recompute):
    places = mgpu.init(contexts or 2)[:2]
    if len(places) < 2:
        sys.exit("a process needs two contexts, such as --contexts 'dev0->cpu;dev1->cpu': by theano-mgpu run without "
                 '--one, or launch --gpus-per-process 2')
    model, alone = TwoTowers(places), TwoTowers()
    options = {'micro_batches': micro_batches, 'recompute': recompute}
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, outputs=[model.output], **options)
    step_alone = theano.function(alone.inputs, [alone.loss, alone.output],
                                 updates=momentum(T.grad(alone.loss, alone.params), alone.params))
    gradients = mgpu.function(model.inputs, T.grad(model.loss, model.params), **options)
    gradients_alone = theano.function(alone.inputs, T.grad(alone.loss, alone.params))
    print('a tower on %s, a tower on %s, the merge on the host'
          % tuple('%s (%s)' % (place.name, place.device) for place in places))

    print('ops: ' + ', '.join('%d on %s' % (n, name) for name, n in
                              Counter(entry.context for entry in mgpu.audit(step)).items()))
    data = list(batches(steps, batch))
    found = {'gradients': difference(gradients(*data[0]), gradients_alone(*data[0])), 'losses': 0, 'outputs': 0}
    for i, arrays in enumerate(data):
        loss, output = step(*arrays)
        loss_alone, output_alone = step_alone(*arrays)
        found['losses'] = max(found['losses'], difference([loss], [loss_alone]))
        found['outputs'] = max(found['outputs'], difference([output], [output_alone]))
        print('step %2d: loss %.6f, on one device %.6f' % (i + 1, loss, loss_alone))
    found['weights'] = difference([param.get_value() for param in model.params],
                                  [param.get_value() for param in alone.params])

    limit = 1e-9 if theano.config.floatX == 'float64' else 1e-5
    for what, largest in found.items():
        print('%-10s differ by %.1e at most%s' % (what, largest, '' if largest <= limit else ': more than %g' % limit))
    return 0 if max(found.values()) <= limit else 1


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='MAP', help=HELP['contexts'])
    parser.add_argument('--steps', type=int, default=20, help=HELP['steps'])
    parser.add_argument('--batch', type=int, default=32, help=HELP['batch'])
    parser.add_argument('--micro-batches', type=int, default=1, help=HELP['micro-batches'])
    parser.add_argument('--recompute', action='store_true', help=HELP['recompute'])
    arguments = parser.parse_args()
    sys.exit(main(**vars(arguments)))
