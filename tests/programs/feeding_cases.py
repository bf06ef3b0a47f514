"""Ways of feeding a Keras model, with random batches; the results of each, and the numbers that are drawn afterwards.

Usage: feeding_cases.py FILE few|all|few,unseeded|all,unseeded. Each process appends its rank to the name. With
`unseeded`, each process draws numbers of its own, but for the initial weights.
"""
import itertools
import json
import os
import pickle
import random
import sys
import time

import theano_mgpu  # noqa: F401  installs the version fixes

import keras
import numpy as np
from keras.callbacks import EarlyStopping, LambdaCallback, ReduceLROnPlateau
from keras.layers import Dense, Dropout, Flatten
from keras.preprocessing.image import ImageDataGenerator

RANK = int(os.environ.get('OMPI_COMM_WORLD_RANK', 0))
UNSEEDED = 'unseeded' in sys.argv[2]
FEW = 'callbacks that draw', 'loop', 'generator, 0 workers', 'images, 1 workers', 'fit of a sequence'
fixed = np.random.RandomState(0)
X, Y = fixed.rand(22, 4, 4, 1), fixed.randn(22, 1)
found = {}


def compiled(dropout=0.0):
    layers = [Flatten(input_shape=(4, 4, 1)), Dense(3, activation='tanh'), Dropout(dropout, seed=5), Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(.05), 'mse', metrics=['mae'], mode='FAST_COMPILE')
    return model


model = compiled()


def begin(model):
    """Give a model its first weights, and the first state of its optimizer."""
    weights = np.random.RandomState(3)
    model.set_weights([weights.randn(*value.shape) * .3 for value in model.get_weights()])
    model.optimizer.set_weights([np.zeros_like(value) for value in model.optimizer.get_weights()])
    keras.backend.set_value(model.optimizer.lr, .05)
    model.reset_metrics()


class Growing(keras.utils.Sequence):
    """A sequence of random batches, fewer in each epoch."""

    def __init__(self):
        self.length = 4

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rows = np.random.RandomState(index).permutation(22)[:7]
        return X[rows] + (random.random() if UNSEEDED else 0), Y[rows]

    def on_epoch_end(self):
        self.length = max(self.length - 1, 2)


def noisy(n=None):
    for _ in itertools.count() if n is None else range(n):
        rows = np.random.permutation(22)[:np.random.randint(5, 9)]
        yield X[rows] + .1 * np.random.randn(len(rows), 4, 4, 1), Y[rows], np.random.rand(len(rows))


def images(**options):
    made = ImageDataGenerator(horizontal_flip=True, rotation_range=20, width_shift_range=.2)
    return made.flow(X, Y, batch_size=6, **options)


def settle():
    """Wait for threads that Keras has left behind: they draw batches that nobody takes, from the state of all."""
    before, now = None, pickle.dumps(np.random.get_state())
    while before != now:
        time.sleep(.3)
        before, now = now, pickle.dumps(np.random.get_state())


def fed_by(name, train, model=model, draws=True):
    if 'few' in sys.argv[2] and name not in FEW:
        return
    begin(model)
    if UNSEEDED:
        np.random.seed()
        random.seed()
    else:
        np.random.seed(7)
        random.seed(7)
    result = train(model)
    result = result.history if hasattr(result, 'history') else {'result': np.asarray(result)}
    found[name] = {key: np.asarray(value, 'float64').ravel().tolist() for key, value in result.items()}
    found[name]['weights'] = [float(np.sum(w)) for w in model.get_weights() + model.optimizer.get_weights()]
    if draws:
        found[name]['drawn'] = [np.random.rand(), random.random()]
    else:
        settle()


def in_a_loop(model):
    losses = []
    for _ in range(12):
        rows = np.random.randint(0, 22, np.random.randint(4, 9))
        losses += list(model.train_on_batch(X[rows], Y[rows], sample_weight=np.random.rand(len(rows))))
        losses += list(model.test_on_batch(X[rows] + np.random.rand(), Y[rows]))
        losses.append(model.predict_on_batch(X[rows[:4]] * np.random.rand()).sum())  # as many rows on each rank
    return losses


def steering():
    return [EarlyStopping('val_loss', patience=1, min_delta=.02), ReduceLROnPlateau('loss', patience=1),
            LambdaCallback(on_epoch_begin=lambda epoch, logs: np.random.rand(3 * RANK))]


def by_generators(workers):
    here = ', %d workers' % workers
    fed_by('generator' + here, lambda m: m.fit_generator(
        noisy(), 4, 3, verbose=0, workers=workers, validation_data=(X, Y) if workers else noisy(), validation_steps=2,
        callbacks=steering(), max_queue_size=2), draws=not workers)
    fed_by('sequence' + here, lambda m: m.fit_generator(Growing(), epochs=3, verbose=0, workers=workers),
           draws=not workers)
    fed_by('images' + here, lambda m: m.fit_generator(
        images(), epochs=3, verbose=0, workers=workers, validation_data=(X, Y) if workers else images(seed=3)),
        draws=not workers)
    fed_by('evaluation' + here, lambda m: m.evaluate_generator(noisy(), 3, workers=workers), draws=False)
    fed_by('prediction' + here, lambda m: m.predict_generator(images(shuffle=True), workers=workers), draws=False)


def main():
    fed_by('arrays', lambda m: m.fit(X, Y, 6, 3, verbose=0, validation_split=.2),
           model=compiled(dropout=.3))
    fed_by('class weights', lambda m: m.fit(X, Y > 0, 6, 2, verbose=0, class_weight={0: 1, 1: 3}, shuffle='batch'))
    fed_by('callbacks that draw', lambda m: m.fit(X, Y, 6, 4, verbose=0, callbacks=steering(), validation_data=(X, Y)))
    # The model is not measured yet: later, ranks compare their undivided results now and then only.
    fed_by('loop', in_a_loop, model=compiled(), draws=not UNSEEDED)
    by_generators(0)
    by_generators(1)
    fed_by('fit of a sequence', lambda m: m.fit(Growing(), epochs=3, verbose=0, workers=3, validation_data=Growing()),
           draws=False)
    fed_by('fit of a generator', lambda m: m.fit(noisy(), steps_per_epoch=4, epochs=2, verbose=0), draws=False)
    fed_by('evaluate of a sequence', lambda m: m.evaluate(Growing(), verbose=0), draws=False)
    fed_by('predict of a sequence', lambda m: m.predict(images(shuffle=True)), draws=False)
    fed_by('processes', lambda m: m.fit_generator(Growing(), epochs=2, verbose=0, workers=2, use_multiprocessing=True),
           draws=False)
    fed_by('old names', lambda m: m.fit_generator(noisy(), samples_per_epoch=3, nb_epoch=2, verbose=0, nb_worker=1),
           draws=False)
    # Plain Keras gives other results each time: threads race for the numbers.
    fed_by('racing threads', lambda m: m.fit_generator(images(), epochs=2, verbose=0, workers=3,
                                                      validation_data=images(seed=2)), draws=False)
    with open('%s.%d' % (sys.argv[1], RANK), 'w') as file:
        json.dump(found, file)


if __name__ == '__main__':
    main()
