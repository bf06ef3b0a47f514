"""Generators and Sequences that call other functions to make their batches; the results and final states of each.

Usage: asking_cases.py FILE 0|1, the number of workers. Each process appends its rank to the name. It runs on any Keras
from 1.2 on; before Keras 2.1 there is a worker in any case.
"""
import json
import os
import sys
import time

import theano_mgpu  # noqa: F401  installs the version fixes

import keras
import numpy as np
from keras import backend as K
from keras.layers import Dense, Dropout
from keras.models import Sequential

RANK, V2 = int(os.environ.get('OMPI_COMM_WORLD_RANK', 0)), keras.__version__ >= '2'
WORKERS = int(sys.argv[2])
fixed = np.random.RandomState(0)
X, Y = fixed.rand(64, 4), fixed.rand(64, 3)
found = {}


def compiled():
    model = Sequential([Dense(5, input_dim=4, activation='tanh'), Dropout(.3), Dense(3)])
    model.compile('adam', 'mse')
    return model


def function_of(model):
    return K.function([model.layers[0].input, K.learning_phase()], [model.layers[-1].output])


class Asking:
    """A model, another one that batches are made with, a function of each that draws, and batches made by ``ask``."""

    def __init__(self, ask):
        self.model, self.other = compiled(), compiled()
        self.draw, self.draw_by_other = function_of(self.model), function_of(self.other)
        self.ask = ask

    def batch(self, number):
        x = X[16 * number:16 * number + 16]
        return x, self.ask(self, x, Y[16 * number:16 * number + 16])

    def batches(self):
        while True:
            for number in range(4):
                yield self.batch(number)

    def fit(self, source, **options):
        if V2:
            options.update(steps_per_epoch=4, epochs=2, max_queue_size=2)
        else:
            options.update(samples_per_epoch=64, nb_epoch=2, max_q_size=2)
        return self.model.fit_generator(source, verbose=0, **options).history['loss']


def asked_by(name, ask, has_sequence=keras.__version__ >= '2.2', is_set=False):
    np.random.seed(4)
    asking = Asking(ask)
    if is_set:  # on all ranks, before rank 0 alone changes it
        asking.other.train_on_batch(X, Y)
        asking.other.set_weights(asking.other.get_weights())
    workers = {'workers': WORKERS} if keras.__version__ >= '2.1' else {}
    results = asking.fit(asking.batches(), **workers)
    if V2:
        results += np.ravel(asking.model.evaluate_generator(asking.batches(), 3, **workers)).tolist()
        xs = (x for x, _ in asking.batches())
        results.append(asking.model.predict_generator(xs, 3, **workers).sum())
    if has_sequence:
        class Batches(keras.utils.Sequence):
            def __len__(self):
                return len(asking.other.predict(X[:4]))

            def __getitem__(self, index):
                return asking.batch(index)

            def on_epoch_end(self):
                asking.other.set_weights([.9 * weights for weights in asking.model.get_weights()])
        results += asking.fit(Batches(), shuffle=False, **workers)
    time.sleep(.5 * WORKERS)  # threads that Keras has left behind make batches which nobody takes
    # Now all ranks call what rank 0 alone has called: functions first, whose draws and weights it has changed.
    results += [draw([X, 1])[0].sum() for draw in (asking.draw_by_other, asking.draw)]
    other = asking.other
    results += np.ravel([other.train_on_batch(X, Y), other.evaluate(X, Y, verbose=0), other.predict(X).sum(),
                         asking.model.train_on_batch(X, Y)]).tolist()
    results += [abs(weights).sum() for model in (asking.model, other) for weights in model.get_weights()]
    found[name] = list(map(float, results))


def main():
    asked_by('predictions', lambda asking, x, y: asking.other.predict(x))
    asked_by('draws', lambda asking, x, y: asking.draw_by_other([x, 1])[0])
    asked_by('tests', lambda asking, x, y: y * asking.other.evaluate(x, y, verbose=0))
    asked_by('steps', lambda asking, x, y: y * asking.other.train_on_batch(x, y))
    asked_by('steps after a set', lambda asking, x, y: y * asking.other.train_on_batch(x, y), False, True)
    asked_by('own predictions', lambda asking, x, y: asking.model.predict(x) ** 2)
    asked_by('own draws', lambda asking, x, y: asking.draw([x, 1])[0])
    with open('%s.%d' % (sys.argv[1], RANK), 'w') as file:
        json.dump(found, file)


if __name__ == '__main__':
    main()
