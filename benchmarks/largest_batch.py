#!/usr/bin/env python
"""The largest batch that a plan predicts, and the one that fits, on a stand-in device.

A step of each model on a small batch tells how large a batch may be. Then steps are tried in processes of their own,
until the largest batch that is computed without slices is known within 3 %.

Examples:

  benchmarks/largest_batch.py
  benchmarks/largest_batch.py --models mlp --memory 512M
"""
import argparse
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), 'tests'))
CLOSE = 1.03


def cnn(layers):
    """Return layers of a CNN, and the shapes of a sample and its target."""
    shape = 3, 24, 24
    return [layers.Conv2D(8, 3, padding='same', activation='relu', input_shape=shape), layers.MaxPooling2D(),
            layers.Conv2D(16, 3, padding='same', activation='relu'), layers.Flatten(), layers.Dense(10)], shape, (10,)


def mlp(layers):
    """Return layers of an MLP, and the shapes of a sample and its target."""
    return [layers.Dense(512, activation='tanh', input_shape=(512,)), layers.Dense(512, activation='tanh'),
            layers.Dense(10)], (512,), (10,)


def lstm(layers):
    """Return layers of an LSTM, and the shapes of a sample and its target."""
    return [layers.LSTM(64, input_shape=(20, 32)), layers.Dense(5)], (20, 32), (5,)


MODELS = {'cnn': (cnn, 512), 'mlp': (mlp, 4096), 'lstm': (lstm, 512)}


def worker(name, batch):
    """Train a model; print the largest batch that the plan predicts, and the slices of the batch."""
    import theano_mgpu as mgpu
    from theano_mgpu.keras import multi_gpu_model
    from theano_mgpu.plan.largest_batch import estimated

    import keras
    import numpy as np
    mgpu.init('dev0->cuda0')
    keras.backend.set_image_data_format('channels_first')
    layers, shape, target = MODELS[name][0](keras.layers)
    model = multi_gpu_model(keras.models.Sequential(layers), gpus=1)
    model.compile('adam', 'mse')
    x, y = np.zeros((batch, *shape), 'float32'), np.zeros((batch, *target), 'float32')
    for _ in range(3):
        model.train_on_batch(x, y)
    built = model.train_function.function.built
    estimate = estimated(built.executable.plan, built.meter)  # None for a batch in slices
    print(json.dumps([estimate and estimate.largest_batch, len(built.splitter.slices)]))


def trained(name, batch, memory):
    """Return what `worker` prints, in a process whose device has so much memory."""
    import cuda_on_cpu
    env = dict(cuda_on_cpu.environment(1, memory=memory, quiet=1), THEANO_FLAGS='floatX=float32,contexts=',
               KERAS_BACKEND='theano')
    done = subprocess.run([sys.executable, __file__, '--worker', name, str(batch)], env=env, text=True,
                          stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def largest(name, near, memory):
    """Return about the largest batch that is computed without slices, near a number of samples."""
    def fits(batch):
        return not trained(name, batch, memory)[1]
    low = high = near
    while not fits(low):
        low, high = int(low / 1.1), low
    while low == high or high > CLOSE * low:
        middle = int(1.1 * low) if low == high else (low + high) // 2
        if fits(middle):
            low, high = middle, middle if low == high else high
        else:
            high = middle
    return low


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS), help='default: all')
    parser.add_argument('--memory', default='512M', help='of the device (default: 512M)')
    parser.add_argument('--worker', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker[0], int(args.worker[1]))
    print('%-6s %10s %10s %10s %10s' % ('MODEL', 'MEASURED', 'PREDICTED', 'FITS', 'RATIO'))
    for name in args.models:
        batch = MODELS[name][1]
        predicted = trained(name, batch, args.memory)[0]
        if predicted is None:
            print('%-6s %10d %10s' % (name, batch, 'too small to tell'))
            continue
        fits = largest(name, predicted, args.memory)
        print('%-6s %10d %10d %10d %10.2f' % (name, batch, predicted, fits, predicted / fits), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
