"""Place a Keras model on two devices: a tower of layers on each, merged on the host. Compare it with one device.

Layers that are called in a block are on its device, with their weights:

    with mgpu.device('dev0'): a = Dense(64)(x)
    with mgpu.device('dev1'): b = Dense(64)(z)
    with mgpu.device('cpu'):  y = Dense(10, activation='softmax')(concatenate([a, b]))
    model = multi_gpu_model(Model([x, z], y))

The towers read the upper and the lower half of scikit-learn's digits.

Gradients, updates and the state of the optimizer are on the devices of the weights. A saved model does not contain the
placement. The script trains the model, and with plain Keras the same model on one device, from the same weights. It
prints the largest differences, and exits with code 1 if the differences are more than rounding. two_towers.py trains
the same model without Keras.

Run, with Theano as the backend of Keras:

    KERAS_BACKEND=theano python examples/two_towers_keras.py
    KERAS_BACKEND=theano python examples/two_towers_keras.py --contexts 'dev0->cuda0;dev1->cuda1'
    KERAS_BACKEND=theano python examples/two_towers_keras.py --contexts 'dev0->cpu;dev1->cpu' --float64
"""
import argparse
import contextlib
import sys
from collections import Counter

import theano_mgpu as mgpu  # before keras
from theano_mgpu.keras import multi_gpu_model

import numpy as np
from keras import backend as K
from keras.layers import Dense, Input, concatenate
from keras.models import Model
from keras.optimizers import SGD
from sklearn.datasets import load_digits

HELP = {
    'contexts': 'devices to use, as "NAME->DEVICE;NAME->DEVICE"; the first tower is on the first device, the second '
                'tower on the second. Default: two of the devices that `theano-mgpu devices` lists',
    'steps': 'training steps (default: %(default)s)',
    'batch': 'samples of a batch; the last batch has one less (default: %(default)s)',
    'float64': 'compute in double precision',
}
HALF, HIDDEN, CLASSES = 32, 64, 10


def two_towers(places=None):
    """Return the model. `places` are two contexts, or None for one device."""
    def on(place):
        return mgpu.device(place) if places else contextlib.nullcontext()
    first, second = places or (None, None)
    x, z = Input((HALF,)), Input((HALF,))
    with on(first):
        a = Dense(HIDDEN, activation='tanh')(Dense(HIDDEN, activation='tanh')(x))
    with on(second):
        b = Dense(HIDDEN, activation='tanh')(Dense(HIDDEN, activation='tanh')(z))
    with on('cpu'):
        y = Dense(CLASSES, activation='softmax')(concatenate([a, b]))
    return Model([x, z], y)


def batches(steps, size):
    """Yield the upper and the lower half of each image, each of shape (n, 32), and labels, shape (n,)."""
    images, labels = load_digits(return_X_y=True)
    for i in range(steps):
        start = i * size % (len(images) - size)
        chosen = slice(start, start + size - (i == steps - 1))
        yield [images[chosen, :HALF] / 16, images[chosen, HALF:] / 16], labels[chosen]


def difference(ours, theirs):
    """Return the largest difference, relative to the largest value."""
    return max(float(abs(np.asarray(a) - b).max() / abs(np.asarray(b)).max()) for a, b in zip(ours, theirs))


def main(contexts, steps, batch, float64):
    if float64:
        K.set_floatx('float64')
    places = mgpu.init(contexts or 2)[:2]
    if len(places) < 2:
        sys.exit("a process needs two contexts, such as --contexts 'dev0->cpu;dev1->cpu': by theano-mgpu run without "
                 '--one, or launch --gpus-per-process 2')
    template, alone = two_towers(places), two_towers()
    alone.set_weights(template.get_weights())
    model = multi_gpu_model(template)
    for each in (model, alone):
        each.compile(SGD(0.1, momentum=0.9), 'sparse_categorical_crossentropy')
    print('a tower on %s, a tower on %s, the merge on the host'
          % tuple('%s (%s)' % (place.name, place.device) for place in places))

    data = list(batches(steps, batch))
    found = {'gradients': 0, 'losses': 0}
    for i, (inputs, labels) in enumerate(data):
        loss, loss_alone = model.train_on_batch(inputs, labels), alone.train_on_batch(inputs, labels)
        found['losses'] = max(found['losses'], difference([loss], [loss_alone]))
        print('step %2d: loss %.6f, on one device %.6f' % (i + 1, loss, loss_alone))
        if i == 0:  # after one step, the state of SGD is the step count, and the gradients times the rate
            found['gradients'] = difference(model.optimizer.get_weights()[1:], alone.optimizer.get_weights()[1:])
    print('ops: ' + ', '.join('%d on %s' % (n, name) for name, n in
                              Counter(entry.context for entry in mgpu.audit(model.train_function.function)).items()))
    found['outputs'] = max(difference([model.predict(inputs)], [alone.predict(inputs)]) for inputs, _ in data)
    found['weights'] = difference(template.get_weights(), alone.get_weights())

    limit = 1e-9 if float64 else 1e-5
    for what, largest in found.items():
        print('%-10s differ by %.1e at most%s' % (what, largest, '' if largest <= limit else ': more than %g' % limit))
    return 0 if max(found.values()) <= limit else 1


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', metavar='MAP', help=HELP['contexts'])
    parser.add_argument('--steps', type=int, default=20, help=HELP['steps'])
    parser.add_argument('--batch', type=int, default=32, help=HELP['batch'])
    parser.add_argument('--float64', action='store_true', help=HELP['float64'])
    arguments = parser.parse_args()
    sys.exit(main(**vars(arguments)))
