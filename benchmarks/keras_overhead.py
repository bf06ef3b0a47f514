#!/usr/bin/env python
"""The overhead of the Keras add-on: its fit on one context, against plain Keras's fit on the same device, in turns.

With --enable, the model is enabled by enable(always=True), as in a script under `theano-mgpu run --always`. With
--predict, a Predictor on one context is compared with plain Keras's predict. Examples:

  python benchmarks/keras_overhead.py
  python benchmarks/keras_overhead.py --models mlp --rounds 15
  python benchmarks/keras_overhead.py --enable
  python benchmarks/keras_overhead.py --predict
"""
import functools
import os

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.keras import Predictor, disable, enable, multi_gpu_model

import keras
import numpy as np
from keras.layers import LSTM, Conv2D, Dense, Flatten, MaxPooling2D
from turns import make_parser, ratio, seconds, take_turns


def cnn():
    """Return a convolution 32 3x3 with ReLU, max-pooling, dense 10."""
    return keras.Sequential([Conv2D(32, (3, 3), activation='relu', input_shape=(28, 28, 1)), MaxPooling2D((2, 2)),
                             Flatten(), Dense(10, activation='softmax')])


def mlp():
    """Return the layers of 784-1024-1024-10."""
    return keras.Sequential([Dense(1024, activation='relu', input_shape=(784,)), Dense(1024, activation='relu'),
                             Dense(10, activation='softmax')])


def lstm():
    """Return one LSTM layer of 64 units, dense 10; 20 steps of 32 values."""
    return keras.Sequential([LSTM(64, input_shape=(20, 32)), Dense(10, activation='softmax')])


MODELS = {'cnn': (cnn, (28, 28, 1), 1280), 'mlp': (mlp, (784,), 2560), 'lstm': (lstm, (20, 32), 2560)}


def compiled(model):
    model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    return model


def fits(build, x, y, batch_size, enables):
    """Return an epoch through the add-on, and one of plain Keras, as callables."""
    if enables:
        enable(gpus=1, always=True)
        ours = compiled(build())
        disable()
    else:
        ours = compiled(multi_gpu_model(build(), gpus=1))
    models = ours, compiled(build())
    return [lambda model=model: model.fit(x, y, batch_size=batch_size, epochs=1, verbose=0) for model in models]


def predictions(build, x, batch_size):
    """Return a prediction by a Predictor, and one by plain Keras, as callables."""
    model = build()
    return [lambda what=what: what.predict(x, batch_size=batch_size) for what in (Predictor(model, gpus=1), model)]


def main():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=list(MODELS))
    parser.add_argument('--batch-size', type=int, default=128, help='(default %(default)s)')
    parser.add_argument('--enable', action='store_true', help='with enable() instead of multi_gpu_model')
    parser.add_argument('--predict', action='store_true', help='predict instead of fit')
    arguments = parser.parse_args()
    mgpu.init('host->cpu')
    rng = np.random.RandomState(0)
    for name in arguments.models:
        build, shape, n = MODELS[name]
        x, y = rng.rand(n, *shape).astype('float32'), rng.randint(0, 10, (n, 1))
        sides = predictions(build, x, arguments.batch_size) if arguments.predict \
            else fits(build, x, y, arguments.batch_size, arguments.enable)
        for side in sides:
            side()  # compiles
        measured = take_turns({kind: functools.partial(seconds, side) for kind, side in zip(('ours', 'plain'), sides)},
                           arguments.rounds, name)
        print('%s, batch %d: %s of %d samples through the add-on %.3f s, plain Keras %.3f s; ratio %s'
              % (name, arguments.batch_size, 'predict' if arguments.predict else 'fit', n, np.median(measured['ours']),
                 np.median(measured['plain']), ratio(measured['ours'], measured['plain'])))


if __name__ == '__main__':
    main()
