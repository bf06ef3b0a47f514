#!/usr/bin/env python
"""Training with less memory than a model needs: the choices, the peak of memory, and the time, on stand-in devices.

Each model trains once with enough memory, which shows how much it needs on a device. Then it trains with a half, a
quarter and an eighth of that, in a process of its own. The loss of each step has to be the same. Memory is counted
without libgpuarray's cache of blocks (gpuarray.preallocate=-1). TIME is the time of a step, in parts of the time with
enough memory.

Examples:

  benchmarks/short_of_memory.py
  benchmarks/short_of_memory.py --models unet --devices 1 --parts 4
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), 'tests'))
STEPS = 3


def vgg(keras):
    """Return a model like VGG, small, and the shapes of a sample and its target."""
    layers, model = keras.layers, keras.models.Sequential()
    for filters in (16, 32, 64):
        for _ in range(2):
            shape = {} if model.layers else {'input_shape': (3, 32, 32)}
            model.add(layers.Conv2D(filters, 3, padding='same', activation='relu', **shape))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dense(128, activation='relu'), layers.Dense(10)):
        model.add(layer)
    return model, (3, 32, 32), (10,)


def unet(keras):
    """Return a U-Net with batch normalisation, and the shapes of a sample and its target."""
    layers = keras.layers

    def block(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding='same', use_bias=False)(x)
            x = layers.Activation('relu')(layers.BatchNormalization(axis=1)(x))
        return x
    image = layers.Input((1, 32, 32))
    x, skipped = image, []
    for filters in (8, 16):
        skipped.append(block(x, filters))
        x = layers.MaxPooling2D()(skipped[-1])
    x = block(x, 32)
    for filters in (16, 8):
        x = layers.concatenate([layers.UpSampling2D()(x), skipped.pop()], axis=1)
        x = block(x, filters)
    return keras.models.Model(image, layers.Conv2D(1, 1)(x)), (1, 32, 32), (1, 32, 32)


def lstm(keras):
    """Return an LSTM, and the shapes of a sample and its target."""
    layers = keras.layers
    return keras.models.Sequential([layers.LSTM(96, input_shape=(40, 32), return_sequences=True), layers.LSTM(96),
                                    layers.Dense(5)]), (40, 32), (5,)


MODELS = {'vgg': (vgg, 128), 'unet': (unet, 64), 'lstm': (lstm, 256)}


def worker(name, n, batch):
    """Train a model on n devices; print the choices, the losses, the seconds of a step and the peak in bytes."""
    import theano_mgpu as mgpu
    from theano_mgpu.keras import multi_gpu_model

    import keras
    import numpy as np
    mgpu.init(';'.join('dev%d->cuda%d' % (i, i) for i in range(n)))
    keras.backend.set_image_data_format('channels_first')
    np.random.seed(1)
    model, shape, target = MODELS[name][0](keras)
    parallel = multi_gpu_model(model, gpus=n)
    parallel.compile(keras.optimizers.Adam(), 'mse')
    x, y = np.random.randn(batch, *shape), np.random.randn(batch, *target)
    losses, seconds = [float(parallel.train_on_batch(x, y)) for _ in range(2)], []
    for _ in range(STEPS):
        began = time.perf_counter()
        losses.append(float(parallel.train_on_batch(x, y)))
        seconds.append(time.perf_counter() - began)
    step, peaks = parallel.train_function.function, []
    cuda = ctypes.CDLL('libcuda.so')
    for i in range(n):
        peak = ctypes.c_size_t()
        cuda.cudaOnCpuPeakMemory(ctypes.byref(peak), i)
        peaks.append(peak.value)
    slices = list(step.built.splitter.slices.values())
    print(json.dumps({'slices': slices[0] if slices else 1, 'update': step.options.updates_on(step.contexts)[0],
                      'losses': losses, 'seconds': sorted(seconds)[len(seconds) // 2], 'peak': max(peaks)}))


def trained(name, n, batch, memory):
    """Return the results of `worker` in a process whose devices have as many bytes of memory; an error as a text."""
    import cuda_on_cpu
    env = cuda_on_cpu.environment(n, memory=memory, quiet=1)
    env['THEANO_FLAGS'] = 'floatX=float32,gpuarray.preallocate=-1,contexts='
    env['KERAS_BACKEND'] = 'theano'
    done = subprocess.run([sys.executable, __file__, '--worker', name, str(n), str(batch)], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        return ' '.join([line for line in done.stderr.splitlines() if line.strip()][-2:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS), help='default: all')
    parser.add_argument('--devices', type=int, default=2, help='number of devices (default: 2)')
    parser.add_argument('--parts', type=int, nargs='+', default=[2, 4, 8], help='parts of the memory (default: 2 4 8)')
    parser.add_argument('--worker', nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker[0], *map(int, args.worker[1:]))
    failed = False
    print('%-6s %-8s %10s %10s  %-24s %6s %s' % ('MODEL', 'MEMORY', 'BYTES', 'PEAK', 'CHOSEN', 'TIME', 'LOSSES'))
    for name in args.models:
        enough = trained(name, args.devices, MODELS[name][1], '4G')
        for part in [1] + args.parts:
            memory = '4G' if part == 1 else enough['peak'] // part
            found = enough if part == 1 else trained(name, args.devices, MODELS[name][1], memory)
            if isinstance(found, str):
                print('%-6s 1/%-6d %10d %s' % (name, part, memory, found), flush=True)
                failed = True
                continue
            same = all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(found['losses'], enough['losses']))
            failed |= not same
            print('%-6s %-8s %10s %10d  %-24s %6.2f %s' % (
                name, 'enough' if part == 1 else '1/%d' % part, memory, found['peak'],
                '%d slices, update on %s' % (found['slices'], found['update']), found['seconds'] / enough['seconds'],
                'same' if same else 'DIFFER %s %s' % (found['losses'], enough['losses'])), flush=True)
    return failed


if __name__ == '__main__':
    sys.exit(main())
