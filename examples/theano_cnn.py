"""Train a small CNN, written in Theano, over two contexts and over one, and compare the two.

`make demo-devices` runs it.

The network has a convolution of 32 3x3 filters with ReLU, 2x2 max-pooling and a dense softmax layer. It is trained with
Adam on scikit-learn's 1,797 scanned digits, scaled to 28x28. Both runs start from the same weights and see the same
batches. Their epochs take turns, so that both see the same load of the machine.

Run:

    python examples/theano_cnn.py
    python examples/theano_cnn.py --contexts 'dev0->cuda0;dev1->cuda1'
    THEANO_FLAGS=floatX=float64 python examples/theano_cnn.py --contexts 'dev0->cpu;dev1->cpu;dev2->cpu' --epochs 3

The script prints a table: the speed of each run, the time of each phase of a step, the accuracy on the test images, and
the largest difference of the parameters between the two runs.
"""
import argparse
import os
import time
from types import SimpleNamespace

if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):  # Theano's own default is float64
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu  # before theano
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import default_map, describe
from theano_mgpu.devices.contexts import flagged

import numpy as np
import theano
import theano.tensor as T
from scipy.ndimage import zoom
from sklearn.datasets import load_digits
from theano.tensor.signal.pool import pool_2d

NOTES = """\
s/step: median over the whole batches, first epoch left out; the phases: means. accuracy: on the test images.
difference: largest of the parameters from the one-context run, relative to the largest value of each; in float32 ReLU
and max-pooling amplify rounding, in float64 (THEANO_FLAGS=floatX=float64) it is about 1e-13."""


def digits():
    """Return images of shape (n, 1, 28, 28), with values from 0 to 1, and labels: 1,500 for training, 297 for test."""
    data = load_digits()
    # Grey levels are whole numbers, so areas of one grey are exact ties for max-pooling. If the ties were inexact, the
    # path of a gradient would depend on rounding.
    images = np.rint(zoom(data.images, (1, 3.5, 3.5), order=1) * (255 / 16))[:, None] / 255
    images, labels = images.astype(theano.config.floatX), data.target.astype('int32')
    order = np.random.RandomState(0).permutation(len(images))
    return [(images[part], labels[part]) for part in (order[:1500], order[1500:])]


def cnn():
    """Return inputs, loss, accuracy and parameters of the network; without a C++ compiler it has dense layers only."""
    rng, params = np.random.RandomState(0), []

    def weights(*shape):
        limit = np.sqrt(6 / ((shape[0] + shape[1]) * np.prod(shape[2:])))  # Glorot and Bengio, 2010
        values = rng.uniform(-limit, limit, shape).astype(theano.config.floatX)
        params.append(theano.shared(values, 'W%d' % len(params)))
        return params[-1]

    def bias(size):
        params.append(theano.shared(np.zeros(size, theano.config.floatX), 'b%d' % len(params)))
        return params[-1]

    x, labels = T.tensor4('x'), T.ivector('labels')
    if theano.config.cxx:
        hidden = T.nnet.relu(T.nnet.conv2d(x, weights(32, 1, 3, 3)) + bias(32).dimshuffle('x', 0, 'x', 'x'))
        hidden, size = pool_2d(hidden, (2, 2), ignore_border=True).flatten(2), 32 * 13 * 13
    else:  # convolutions need a C++ compiler
        hidden, size = T.nnet.relu(T.dot(x.flatten(2), weights(784, 64)) + bias(64)), 64
    probabilities = T.nnet.softmax(T.dot(hidden, weights(size, 10)) + bias(10))
    loss = T.nnet.categorical_crossentropy(probabilities, labels).mean()
    accuracy = T.eq(T.argmax(probabilities, axis=1), labels).mean()
    return SimpleNamespace(inputs=[x, labels], loss=loss, accuracy=accuracy, params=params)


def adam(gradients, params, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return the updates of Adam (Kingma and Ba, 2014)."""
    def state(value, name):
        return theano.shared(np.asarray(value, theano.config.floatX), name)

    t = state(0, 't')
    rate = rate * T.sqrt(1 - beta2 ** (t + 1)) / (1 - beta1 ** (t + 1))
    updates = [(t, t + 1)]
    for param, gradient in zip(params, gradients):
        m, v = [state(0 * param.get_value(), '%s.%s' % (param, name)) for name in 'mv']
        new_m, new_v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient ** 2
        updates += [(m, new_m), (v, new_v), (param, param - rate * new_m / (T.sqrt(new_v) + epsilon))]
    return [(variable, T.cast(value, variable.dtype)) for variable, value in updates]


class Run:
    """A model in training over some contexts."""

    def __init__(self, names):
        self.model, self.seconds = cnn(), []
        begin = time.perf_counter()
        self.step = mgpu.training_function(self.model.inputs, self.model.loss, self.model.params, adam, contexts=names)
        self.accuracy = mgpu.function(self.model.inputs, self.model.accuracy, contexts=names)
        self.n = self.step.n_replicas  # in all processes
        print('%d context%s: compiled in %.0f s' % (self.n, 's' * (self.n > 1), time.perf_counter() - begin))

    def epoch(self, number, images, labels, order, size):
        """Train on all samples in the given order."""
        losses = []
        for start in range(0, len(order), size):
            batch, begin = order[start:start + size], time.perf_counter()
            losses.append(float(self.step(images[batch], labels[batch])))
            if number > 1 and len(batch) == size:
                self.seconds.append(time.perf_counter() - begin)
        print('epoch %2d, %d context%s: loss %.6f' % (number, self.n, 's' * (self.n > 1), np.mean(losses)), flush=True)
        if number == 1:  # the first epoch warms up
            self.step.timings.reset()
            self.step.timings.exact = True

    def results(self, test, size, reference):
        """Return the row of the table: a dict from column to text."""
        seconds = np.median(self.seconds) if self.seconds else float('nan')
        row = {'contexts': '%d' % self.n, 'samples/s': '%.0f' % (size / seconds), 's/step': '%.4f' % seconds}
        row.update((phase, '%.4f' % value) for phase, value in self.step.timings.per_call().items())
        pairs = [(p.get_value(), q.get_value()) for p, q in zip(self.model.params, reference.model.params)]
        row['accuracy'] = '%.4f' % self.accuracy(*test)
        largest = max(abs(p - q).max() / abs(q).max() for p, q in pairs)
        row['difference'] = '-' if self is reference else '%.1e' % largest
        return row


def open_contexts(asked, opencl_cpus):
    """Open the contexts of --contexts, or else the mapped contexts, or else two of this machine's devices."""
    if asked:
        return mgpu.init(int(asked) if asked.isdigit() else asked)
    if flagged():
        return mgpu.init()
    devices = discovery.discover_best()
    if devices == ['cpu'] and opencl_cpus:
        devices = discovery.opencl_cpus() or devices
    return mgpu.init(default_map((devices * 2)[:2]))  # a single device is used twice


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='N|MAP', help="how many of the mapped contexts, or of this machine's "
                        "devices; or a map, such as 'dev0->cuda0;dev1->cuda1'. Default: the contexts of THEANO_FLAGS "
                        "or .theanorc, else two on this machine's devices")
    parser.add_argument('--opencl-cpus', action='store_true', help='without a GPU, use the CPU through OpenCL if '
                        'possible: the code paths of a GPU, and slower than a `cpu` context')
    parser.add_argument('--epochs', type=int, default=9, help='(default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=128, help='samples of the whole batch (default: %(default)s)')
    arguments = parser.parse_args()
    if arguments.epochs < 2 or arguments.batch_size < 1:
        parser.error('--epochs must be at least 2, because the first one is not timed, and --batch-size at least 1')
    contexts = open_contexts(arguments.contexts, arguments.opencl_cpus)
    train, test = digits()
    print('contexts: %s\ndata: %d training and %d test images' % (describe(contexts), len(train[0]), len(test[0])))
    if not theano.config.cxx:
        print('no C++ compiler, which convolutions need (Debian: apt-get install g++ python3-dev): '
              'dense layers instead')

    names = [context.name for context in contexts]
    if mgpu.size() == len(names) == 1:
        print("there is one context to compare with itself: --contexts 'dev0->cpu;dev1->cpu' makes two")
    one = Run(names[:1])
    runs = [one] if len(names) == 1 else [one, Run(names)]
    rng = np.random.RandomState(0)
    for number in range(1, arguments.epochs + 1):
        order = rng.permutation(len(train[0]))
        for run in runs:
            run.epoch(number, *train, order, arguments.batch_size)

    rows = [run.results(test, arguments.batch_size, one) for run in runs]
    widths = [max(10, len(title)) for title in rows[0]]
    print()
    for cells in [rows[0].keys()] + [row.values() for row in rows]:
        print('  '.join(cell.rjust(width) for cell, width in zip(cells, widths)))
    print('\n' + NOTES)


if __name__ == '__main__':
    main()
