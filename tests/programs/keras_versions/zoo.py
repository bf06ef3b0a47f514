"""Six kinds of models that Keras 0.3 to 2.3 can train, with the names of the installed version.

    python zoo.py KIND...               plain, then over two contexts of the CPU; the largest differences, as JSON
    python zoo.py --write FILE KIND...  as this process computes them, into a file of arrays

Each model is trained for two epochs of ragged batches, evaluated, and asked for predictions. Its results are these, its
weights, and the state of its optimizer.
"""
import importlib
import json
import sys

import theano_mgpu as mgpu

import keras
import numpy as np
from keras import backend as K
from keras.layers import recurrent
from keras.layers.core import Activation, Dense, Dropout, Flatten, Masking
from keras.layers.noise import GaussianNoise
from keras.layers.normalization import BatchNormalization
from keras.models import Sequential
from keras.optimizers import SGD, Adam, RMSprop
from zoo_difference import difference

VERSION = tuple(int(number) for number in keras.__version__.split('.')[:2])
if VERSION >= (1, 2):  # before, the modules of Keras have copies of this setting
    K.set_floatx('float64')
OF_2 = VERSION >= (2, 0)
EPOCHS = 'epochs' if OF_2 else 'nb_epoch'
N = 21  # samples, in batches of 8


def noise(*shape):
    return np.random.RandomState(sum(shape)).randn(*shape).astype('float32')


def one_hot(classes=3):
    return np.eye(classes, dtype='float32')[np.arange(N) % classes]


def regularizer(amount):
    from keras import regularizers
    return regularizers.l2(amount)


def of_images():
    if VERSION < (1, 0):
        from keras.layers.convolutional import Convolution2D, MaxPooling2D
        first = Convolution2D(4, 3, 3, input_shape=(1, 8, 8))
    elif not OF_2:
        from keras.layers import Convolution2D, MaxPooling2D
        first = Convolution2D(4, 3, 3, input_shape=(1, 8, 8), dim_ordering='th')
    else:
        from keras.layers import Conv2D, MaxPooling2D
        first = Conv2D(4, (3, 3), input_shape=(1, 8, 8), data_format='channels_first')
    pool = {} if VERSION < (1, 0) else {'data_format': 'channels_first'} if OF_2 else {'dim_ordering': 'th'}
    model = Sequential()
    # A bias right before a batch normalisation would have a gradient of zero: pure rounding.
    for layer in (first, Activation('relu'), BatchNormalization(axis=1), MaxPooling2D(pool_size=(2, 2), **pool),
                  Dropout(.25), Flatten(), Dense(3), Activation('softmax')):
        model.add(layer)
    model.compile(loss='categorical_crossentropy', optimizer=SGD(lr=.05, momentum=.9))
    return model, noise(N, 1, 8, 8), one_hot(), {}


def of_sequences():
    model = Sequential()
    rates = dict(dropout=.2, recurrent_dropout=.2) if OF_2 else dict(dropout_W=.2, dropout_U=.2) if VERSION >= (1, 0) \
        else {}
    model.add(recurrent.LSTM(5, input_shape=(4, 3), **rates))
    model.add(Dropout(.3))
    model.add(Dense(3))
    model.add(Activation('softmax'))
    model.compile(loss='categorical_crossentropy', optimizer=Adam(lr=.01))
    return model, noise(N, 4, 3), one_hot(), {}


def of_masked_sequences():
    model = Sequential()
    model.add(Masking(mask_value=0., input_shape=(5, 3)))
    model.add(recurrent.GRU(4))
    model.add(Dense(1))
    model.compile(loss='mse', optimizer=RMSprop(lr=.01))
    x = noise(N, 5, 3)
    for i in range(N):
        x[i, 1 + i % 5:] = 0
    return model, x, noise(N, 1), {}


def of_two_branches():
    first, second = {'W_regularizer': regularizer(.01)}, {}
    if VERSION < (1, 0):
        from keras.models import Graph
        model = Graph()
        model.add_input(name='a', input_shape=(4,))
        model.add_input(name='b', input_shape=(3,))
        model.add_node(Dense(5, activation='tanh', **first), name='left', input='a')
        model.add_node(Dense(5, activation='tanh'), name='right', input='b')
        model.add_node(Dense(2), name='one', inputs=['left', 'right'], merge_mode='concat')
        model.add_node(Dense(1), name='two', inputs=['left', 'right'], merge_mode='sum')
        model.add_output(name='p', input='one')
        model.add_output(name='q', input='two')
        model.compile('adam', {'p': 'mse', 'q': 'mse'})
        return model, {'a': noise(N, 4), 'b': noise(N, 3)}, {'p': noise(N, 2), 'q': noise(N, 1)}, {}
    from keras.layers import Input
    from keras.models import Model
    if OF_2:
        from keras.layers import add, concatenate
        first = {'kernel_regularizer': first['W_regularizer']}
    else:
        from keras.layers import merge

        def concatenate(tensors):
            return merge(tensors, mode='concat')

        def add(tensors):
            return merge(tensors, mode='sum')
    a, b = Input(shape=(4,), dtype=K.floatx()), Input(shape=(3,), dtype=K.floatx())
    branches = [Dense(5, activation='tanh', **first)(a), Dense(5, activation='tanh', **second)(b)]
    outputs = [Dense(2, name='one')(concatenate(branches)), Dense(1, name='two')(add(branches))]
    names = {'inputs': [a, b], 'outputs': outputs} if OF_2 else {'input': [a, b], 'output': outputs}
    model = Model(**names)
    model.compile(optimizer=Adam(lr=.01), loss='mse', loss_weights=[1., .5])
    return model, [noise(N, 4), noise(N, 3)], [noise(N, 2), noise(N, 1)], {}


def of_weighted_classes():
    model = Sequential()
    model.add(Dense(6, input_shape=(4,)))
    model.add(GaussianNoise(.1))
    model.add(Activation('tanh'))
    model.add(Dense(3))
    model.add(Activation('softmax'))
    model.compile(loss='categorical_crossentropy', optimizer=SGD(lr=.1, momentum=.5, clipnorm=.3))
    return model, noise(N, 4), one_hot(), {'class_weight': {0: 1., 1: 2., 2: .5}}


def of_normalised_rows():
    model = Sequential()
    for layer in (Dense(6, input_shape=(4,)), Activation('tanh'), BatchNormalization(), Dropout(.3), Dense(1),
                  Activation('sigmoid')):
        model.add(layer)
    model.compile(loss='mse', optimizer='sgd')
    return model, noise(N, 4), noise(N, 1), {}


def with_a_state():
    name = 'batch_input_shape'
    model = Sequential()
    model.add(recurrent.LSTM(4, stateful=True, **{name: (6, 3, 2)}))
    model.add(Dense(1))
    model.compile(loss='mse', optimizer='sgd')
    return model, noise(18, 3, 2), noise(18, 1), {'batch_size': 6}


KINDS = {make.__name__: make for make in (of_images, of_sequences, of_masked_sequences, of_two_branches,
                                          of_weighted_classes, of_normalised_rows, with_a_state)}


def results_of(make):
    """Train and use a model; return its numbers by name."""
    np.random.seed(7)
    if VERSION[0] == 1:  # it sorts weights by the names of their layers
        importlib.import_module('keras.backend.common').reset_uids()
    model, x, y, more = make()
    if isinstance(x, dict):  # a Graph of Keras 0.3
        data = dict(x, **y)
        history = model.fit(data, batch_size=8, nb_epoch=2, verbose=0, shuffle=False)
        results = {'evaluated': np.asarray(model.evaluate(data, batch_size=8, verbose=0))}
        predictions = [each for _, each in sorted(model.predict(x, batch_size=8).items())]
    else:
        options = dict({'batch_size': 8, 'verbose': 0, 'shuffle': False}, **more)
        history = model.fit(x, y, **dict(options, **{EPOCHS: 2}))
        size = options['batch_size']
        results = {'evaluated': np.asarray(model.evaluate(x, y, batch_size=size, verbose=0))}
        predictions = model.predict(x, batch_size=size)
        predictions = predictions if isinstance(predictions, list) else [predictions]
    losses = history.history['loss'] if hasattr(history, 'history') else history['loss']
    results['history'] = np.asarray(losses)
    results.update(('prediction %d' % i, each) for i, each in enumerate(predictions))
    results.update(('weight %d' % i, each) for i, each in enumerate(model.get_weights()))
    state = getattr(model.optimizer, 'weights', None) or [update[0] for update in model.optimizer.updates]
    results.update(('optimizer %d' % i, np.asarray(K.get_value(each))) for i, each in enumerate(state))
    return results


def all_results(kinds):
    return {'%s: %s' % (kind, name): value for kind in kinds for name, value in results_of(KINDS[kind]).items()}


def compared(kinds):
    """Return the largest difference of each kind between one device and two contexts, and the divided functions."""
    plain = all_results(kinds)
    mgpu.init('a->cpu;b->cpu')
    report = mgpu.enable(always=True)
    divided = all_results(kinds)
    assert plain.keys() == divided.keys()
    worst = {kind: max(difference(plain[name], divided[name]) for name in plain if name.startswith(kind + ':'))
             for kind in kinds}
    runs = sum(len(usage.contexts) == 2 for usage in report.usages)
    return {'version': keras.__version__, 'differences': worst, 'divided': runs}


if __name__ == '__main__':
    if sys.argv[1] == '--write':
        np.savez(sys.argv[2], **all_results(sys.argv[3:] or KINDS))
    else:
        print(json.dumps(compared(sys.argv[1:])))
