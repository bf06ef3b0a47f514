#!/usr/bin/env python
"""The estimate of the memory of a training step, against the most memory that the CUDA stand-in counts on a device.

Each model trains in a process of its own, on the devices of tests/cuda_on_cpu, with Theano's flag
gpuarray.preallocate=-1: each array is then an allocation of its own, and memory is in use as long as an array
is. The peak is the most bytes in use at one time in steps after the first two. By default libgpuarray keeps blocks that
are freed, and cuts them up for later arrays; --cache shows the memory that the driver has then. The columns:

  BATCH      samples in the whole batch, and the micro-batches of each replica, if there are several
  DEVICE     one of the devices that the model trains on
  ESTIMATE   of the peak, from the compiled functions and the shapes of the batch, in MB
  PEAK       counted by the stand-in, in MB
  RATIO      estimate / peak; the target is 0.85 to 1.15

Examples:

  python benchmarks/memory.py
  python benchmarks/memory.py --models lstm unet
  python benchmarks/memory.py --cache
"""
import argparse
import gc
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
STAND_IN = os.path.join(HERE, os.pardir, 'tests', 'cuda_on_cpu')
sys.path.insert(0, os.path.join(HERE, os.pardir, 'tests'))

import theano_mgpu as mgpu
from theano_mgpu.runtime.memory.step import DryStep
from theano_mgpu.utils.tables import table

import models
import numpy as np
import theano.tensor as T
from support.device_memory import peaks
from turns import write_json

STEPS = 3  # that count, after two


def classified(model, shape):
    """Return the inputs, loss and parameters of a classifier of models.py, and a function that makes batches for it."""
    def batch(n):
        rng = np.random.RandomState(0)
        return rng.rand(n, *shape).astype('float32'), rng.randint(0, 10, n).astype('int32')
    return model.inputs, model.loss, model.params, batch


def reconstructed(x, outputs, params, shape, target=None):
    """Return the inputs, mean squared error and parameters of a model, and a function that makes batches for it."""
    y = outputs.type('y')

    def batch(n):
        rng = np.random.RandomState(0)
        return rng.rand(n, *shape).astype('float32'), rng.rand(n, *(target or shape)).astype('float32')
    return [x, y], T.sqr(outputs - y).mean(), params, batch


def placed():
    """Return a dense network of four layers on two devices."""
    x = hidden = T.matrix('x')
    params, rng = [], np.random.RandomState(0)
    for i in range(4):
        with mgpu.device('dev%d' % (i // 2)):
            params.append(models.shared(models.uniform(rng, 512, 512), 'w%d' % i))
            hidden = T.tanh(T.dot(hidden, params[-1]))
    return reconstructed(x, hidden, params, (512,))


def matrix():
    """Return a matrix that is almost all of the memory, with a loss over few samples."""
    x, w = T.matrix('x'), models.shared(np.zeros((2000, 2000)), 'w')
    return reconstructed(x, T.tanh(T.dot(x, w)), [w], (2000,))


def theano_step(make, updates=models.adam, **options):
    """Return a function that makes a training step of Theano: it returns the step, and one that runs it on a batch."""
    def of_model(n_devices, batch_size):
        inputs, loss, params, batch = make()
        step = mgpu.training_function(inputs, loss, params, updates, name='net', **options)
        arrays = batch(batch_size)
        return lambda: step(*arrays), lambda: step
    return of_model


def keras_step(make, optimizer, loss='categorical_crossentropy'):
    """Return a function that makes a Keras model: it returns a function that trains it, and one for its step."""
    def of_model(n_devices, batch_size):
        from theano_mgpu.keras import multi_gpu_model
        model, shape, target = make()
        parallel = multi_gpu_model(model, gpus=n_devices)
        parallel.compile(optimizer, loss)
        rng = np.random.RandomState(0)
        x = rng.randint(0, 1000, (batch_size, *shape)) if shape == (50,) else rng.rand(batch_size, *shape)
        y = np.eye(*target, dtype='float32')[rng.randint(0, target[0], batch_size)] if len(target) == 1 else \
            rng.rand(batch_size, *target)
        return lambda: parallel.train_on_batch(x, y), lambda: parallel.train_function.function
    return of_model


def vgg():
    """Return two blocks of two convolutions and pooling, dense layers with dropout; as VGG (Simonyan et al., 2014)."""
    from keras import layers as L
    from keras.models import Sequential
    blocks = [[L.Conv2D(n, 3, padding='same', activation='relu'), L.Conv2D(n, 3, padding='same', activation='relu'),
               L.MaxPooling2D()] for n in (16, 32)]
    return Sequential([L.InputLayer((32, 32, 3)), *blocks[0], *blocks[1], L.Flatten(), L.Dense(128, activation='relu'),
                       L.Dropout(0.5), L.Dense(10, activation='softmax')]), (32, 32, 3), (10,)


def unet():
    """Return a U-Net of three levels with batch normalisation (Ronneberger et al., 2015)."""
    from keras import layers as L
    from keras.models import Model

    def convolved(x, n):
        return L.Activation('relu')(L.BatchNormalization()(L.Conv2D(n, 3, padding='same')(x)))
    x = image = L.Input((32, 32, 1))
    skipped = []
    for n in (8, 16):
        skipped.append(convolved(x, n))
        x = L.MaxPooling2D()(skipped[-1])
    x = convolved(x, 32)
    for n in (16, 8):
        x = convolved(L.concatenate([L.UpSampling2D()(x), skipped.pop()]), n)
    return Model(image, L.Conv2D(1, 1, activation='sigmoid')(x)), (32, 32, 1), (32, 32, 1)


def recurrent():
    """Return an LSTM over 20 steps."""
    from keras import layers as L
    from keras.models import Sequential
    return Sequential([L.LSTM(64, input_shape=(20, 32)), L.Dense(10, activation='softmax')]), (20, 32), (10,)


def embedded():
    """Return an embedding of 1,000 words, and dense layers over its mean."""
    from keras import layers as L
    from keras.models import Sequential
    return Sequential([L.Embedding(1000, 64, input_length=50), L.GlobalAveragePooling1D(),
                       L.Dense(64, activation='relu'), L.Dense(10, activation='softmax')]), (50,), (10,)


def autoencoder():
    """Return a dense autoencoder 784-256-32-256-784."""
    from keras import layers as L
    from keras.models import Sequential
    return Sequential([L.Dense(256, activation='relu', input_shape=(784,)), L.Dense(32, activation='relu'),
                       L.Dense(256, activation='relu'), L.Dense(784, activation='sigmoid')]), (784,), (784,)


def mlp():
    return classified(models.mlp(), (784,))


def cnn():
    return classified(models.cnn(), (1, 28, 28))


# name -> (devices, samples, micro-batches, what makes the step)
MODELS = {
    'mlp, sgd': (2, 1024, 1, theano_step(mlp, models.sgd)),
    'mlp, adam, slices': (2, 4096, 4, theano_step(mlp, micro_batches=4)),
    'cnn': (1, 256, 1, theano_step(cnn)),
    'vgg, dropout': (2, 64, 1, keras_step(vgg, 'adam')),
    'unet, batch norm.': (2, 32, 1, keras_step(unet, 'adam', 'mse')),
    'lstm': (2, 256, 1, keras_step(recurrent, 'adam')),
    'embedding': (2, 256, 1, keras_step(embedded, 'rmsprop')),
    'autoencoder': (2, 1024, 1, keras_step(autoencoder, 'adadelta', 'mse')),
    'placed': (2, 1024, 4, theano_step(placed, micro_batches=4)),
    'large update': (2, 16, 1, theano_step(matrix)),
    'divided update': (2, 256, 1, theano_step(mlp, update_on='sharded'))}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=list(MODELS), metavar='NAME', default=list(MODELS),
                        help='some of: %s' % '; '.join(MODELS))
    parser.add_argument('--cache', action='store_true', help='leave the cache of libgpuarray on')
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--measure', metavar='NAME', choices=list(MODELS), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name):
    """Train a model, and print the estimate and the peak of each device in a line of JSON."""
    n, samples, slices, make = MODELS[name]
    mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(n)))
    run, step = make(n, samples)
    for _ in range(2):
        run()
    gc.collect()
    peaks(n)
    for _ in range(STEPS):
        run()
    counted, function = peaks(n), step()
    estimated = DryStep(function.executable, function.built.splitter).peaks(samples)
    print('memory %s' % json.dumps([dict(model=name, batch=samples, micro_batches=slices, device=context.name,
                                         estimate=estimated and estimated[context], peak=peak)
                                    for context, peak in zip(function.mesh.contexts, counted)]), flush=True)


def measured(name, is_cached):
    """Return the measurements of a model that trains in a process of its own on the stand-in."""
    flags = ['floatX=float32', os.environ.get('THEANO_FLAGS', '')] + ['gpuarray.preallocate=-1'] * (not is_cached)
    done = subprocess.run([sys.executable, STAND_IN, 'run', '--devices', str(MODELS[name][0]), sys.executable,
                           os.path.abspath(__file__), '--measure', name],
                          env=dict(os.environ, THEANO_FLAGS=','.join(filter(None, flags)), KERAS_BACKEND='theano'),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('memory ')]
    if done.returncode or not lines:
        raise RuntimeError('%s has failed:\n%s' % (name, done.stderr))
    return json.loads(lines[0][len('memory '):])


def line(row):
    """Return a row of the table as text."""
    slices = ' in %d' % row['micro_batches'] if row['micro_batches'] > 1 else ''
    estimate, peak = row['estimate'], row['peak']
    return [row['model'], '%d%s' % (row['batch'], slices), row['device'], *(
        ['%.2f' % (estimate / 1e6), '%.2f' % (peak / 1e6), '%.3f' % (estimate / peak)] if estimate else
        ['?', '%.2f' % (peak / 1e6), '?'])]


def main():
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments.measure)
        return 0
    rows = []
    for name in arguments.models:
        print('measuring %s' % name, file=sys.stderr, flush=True)
        rows += measured(name, arguments.cache)
    print(table([['MODEL', 'BATCH', 'DEVICE', 'ESTIMATE', 'PEAK', 'RATIO']] + [line(row) for row in rows],
                right={1, 3, 4, 5}))
    write_json(rows, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
