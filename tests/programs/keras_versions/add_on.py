"""`theano_mgpu.keras` with the Keras that is installed; fails where its results differ from plain Keras.

add_on.py compare KIND ...              `enable`, `multi_gpu_model` and `verify` for models of `zoo`
add_on.py train FILE                    trains a model with callbacks, and writes all its numbers
add_on.py train FILE CHECKPOINT [N]     the same with a Checkpoint; ends as if killed after N batches
add_on.py feed FILE [CHECKPOINT [N]]    the same for batches of a generator
add_on.py save FILE                     saves models of `multi_gpu_model`, and places and balances layers
add_on.py ahead CONTEXTS                counts the batches of fit and fit_generator that are sent ahead
add_on.py shard FILE                    trains a model; with flags for it, each process has samples of its own
"""
import json
import os
import sys

import theano_mgpu as mgpu
from theano_mgpu.keras import Checkpoint, balance, disable, enable, multi_gpu_model, place, verify
from theano_mgpu.keras.hooks.writers import only_writes
from theano_mgpu.runtime.batches.prefetch import LookAhead

import keras
import numpy as np
import zoo
from keras import backend as K
from keras import callbacks, models
from keras.layers.core import Activation, Dense, Dropout
from keras.models import Sequential

EPOCHS, BATCHES = 3, 5


def differences(one, other):
    assert one.keys() == other.keys()
    return max(zoo.difference(one[name], other[name]) for name in one)


def parallel(kind):
    model, *others = zoo.KINDS[kind]()
    return (multi_gpu_model(model), *others)


def is_verified(kind):
    model, x, y, options = zoo.KINDS[kind]()
    inputs, targets = ([array[:options.get('batch_size', 8)] for array in (data if isinstance(data, list) else [data])]
                       for data in (x, y))
    before = model.get_weights()
    report = str(verify(model, inputs if isinstance(x, list) else inputs[0],
                        targets if isinstance(y, list) else targets[0]))
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
    return report.splitlines()[-1].startswith('same answer')


def compare(kinds):
    """Return the differences of each kind from plain Keras, the rows of the report, and which callbacks only write."""
    plain = {kind: zoo.results_of(zoo.KINDS[kind]) for kind in kinds}
    mgpu.init('a->cpu;b->cpu')
    of_parallel = {kind: zoo.results_of(lambda kind=kind: parallel(kind)) for kind in kinds}
    report = enable(always=True)
    enabled = {kind: zoo.results_of(zoo.KINDS[kind]) for kind in kinds}
    disable()
    return {'version': keras.__version__, 'rows': [[*usage.name.split(), len(usage.contexts)]
                                                   for usage in report.usages],
            'verified': [is_verified(kind) for kind in kinds], 'printed': str(report),
            'only_write': [only_writes(each) for each in (callbacks.History(), callbacks.ModelCheckpoint('file'))],
            'enabled': {kind: differences(plain[kind], enabled[kind]) for kind in kinds},
            'parallel': {kind: differences(plain[kind], of_parallel[kind]) for kind in kinds}}


class Killed(callbacks.Callback):
    """A callback that ends the process without any clean-up after a number of batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os._exit(7)


def with_noise():
    np.random.seed(5)
    model = Sequential()
    for layer in (Dense(6, input_dim=4), Activation('tanh'), Dropout(.3), Dense(3), Activation('softmax')):
        model.add(layer)
    model.compile(optimizer='adam', loss='categorical_crossentropy', metrics=['accuracy'])
    return model


def batches(x, y):
    rng = np.random.RandomState(9)
    while True:
        rows = rng.permutation(len(x))[:8]
        yield x[rows], y[rows]


def train(is_fed, path, checkpoint=None, killed=0):
    """Train a model over contexts, and write its weights, the state of its optimizer, and its history."""
    mgpu.init('a->cpu;b->cpu')
    report = enable(always=True)
    x, y, model = zoo.noise(zoo.N, 4), zoo.one_hot(), with_noise()
    called = [Checkpoint(checkpoint, every=2)] * bool(checkpoint) + [
        callbacks.ModelCheckpoint(path + '.h5'), callbacks.EarlyStopping(patience=2), Killed(int(killed))]
    if hasattr(callbacks, 'CSVLogger'):  # since Keras 1.1
        called.append(callbacks.CSVLogger(path + '.csv'))
    options = {zoo.EPOCHS: EPOCHS, 'validation_data': (x[::2], y[::2]), 'callbacks': called, 'verbose': 2}
    if is_fed:
        steps = {'steps_per_epoch': BATCHES} if zoo.OF_2 else {'samples_per_epoch': BATCHES * 8}
        history = model.fit_generator(batches(x, y), **options, **steps)
    else:
        history = model.fit(x, y, batch_size=5, **options)
    write(path, model, history, evaluated=model.evaluate(x, y, batch_size=4, verbose=0),
          predicted=model.predict(x, batch_size=6))
    print(json.dumps(next(usage.samples for usage in report.usages if usage.name.endswith(' train'))))


def write(path, model, history, **arrays):
    arrays.update(('weight %d' % i, array) for i, array in enumerate(model.get_weights()))
    arrays.update(('optimizer %d' % i, array) for i, array in enumerate(map(K.get_value, model.optimizer.weights)))
    arrays.update(('history ' + name, values) for name, values in history.history.items())
    np.savez('%s.%d.npz' % (path, mgpu.rank()), **arrays)


def ahead(contexts):
    """Return the numbers of batches that were sent ahead, in a fit and in a fit_generator of two epochs each."""
    mgpu.init(contexts)
    model, x, y, sent, take = multi_gpu_model(with_noise()), zoo.noise(zoo.N, 4), zoo.one_hot(), [], LookAhead.take

    def note(self, *arguments):
        found = take(self, *arguments)
        sent.append(found is not None)
        return found
    LookAhead.take = note
    model.fit(x, y, batch_size=5, verbose=0, **{zoo.EPOCHS: 2})
    of_fit = sum(sent)
    steps = {'steps_per_epoch': BATCHES} if zoo.OF_2 else {'samples_per_epoch': BATCHES * 8}
    model.fit_generator(batches(x, y), verbose=0, **{zoo.EPOCHS: 2}, **steps)
    return of_fit, sum(sent) - of_fit


def save(path):
    """Save and load models over contexts, and train them with layers on devices that `balance` has chosen."""
    plain, x, y = with_noise(), zoo.noise(zoo.N, 4), zoo.one_hot()
    expected = [plain.train_on_batch(x, y) for _ in range(3)]
    mgpu.init('a->cpu;b->cpu')
    enable(always=True)
    model = with_noise()
    assert set(place(model, balance(model, 2)).layers) == set(model.layers)
    np.testing.assert_allclose([model.train_on_batch(x, y) for _ in range(3)], expected, 1e-5)
    for saved in (model, multi_gpu_model(model)):
        expected = saved.predict(x)
        saved.save_weights(path, overwrite=True)
        saved.set_weights([weight * 0 for weight in saved.get_weights()])
        saved.load_weights(path)
        np.testing.assert_allclose(saved.predict(x), expected, 1e-5)
        if zoo.VERSION >= (1, 1):
            saved.save(path)
            loaded = models.load_model(path)
            assert type(loaded) is Sequential
            np.testing.assert_allclose(loaded.predict(x), expected, 1e-5)
            assert len(loaded.optimizer.weights) == len(saved.optimizer.weights)
            saved.train_on_batch(x, y)
            loaded.train_on_batch(x, y)
    assert not [name for name in os.listdir(os.path.dirname(path)) if 'unfinished' in name]
    if hasattr(keras.utils, 'multi_gpu_model'):
        assert keras.utils.multi_gpu_model(with_noise(), 2).contexts == mgpu.contexts()


def shard(path):
    """Train with batches of five samples; with two processes, the first one has three of them, the other one two."""
    mgpu.init('a->cpu')
    enable(always=True)
    model, rows = with_noise(), np.arange(20)
    own = rows if mgpu.size() == 1 else rows[(rows % 5 < 3) == (mgpu.rank() == 0)]
    x, y, size = zoo.noise(zoo.N, 4)[own], zoo.one_hot()[own], len(own) // 4
    options = {zoo.EPOCHS: EPOCHS, 'batch_size': size, 'verbose': 0}
    history = model.fit(x, y, shuffle=False, validation_data=(x[::-1], y[::-1]), **options)
    write(path, model, history, evaluated=model.evaluate(x, y, batch_size=size, verbose=0))


if __name__ == '__main__':
    action, *words = sys.argv[1:]
    if action == 'compare':
        print(json.dumps(compare(words)))
    elif action == 'ahead':
        print(json.dumps(ahead(*words)))
    elif action == 'shard':
        shard(*words)
    elif action == 'save':
        save(*words)
    else:
        train(action == 'feed', *words)
