#!/usr/bin/env python
"""Seconds from the start of a process to the end of its first batch, with nothing compiled before, in turns.

Compared are plain Keras with one module of C code compiled at a time, as Theano does it; plain Keras with one for each
core; and the same for a model over two contexts. Each process has a new folder of compiled code. With --imports,
processes that only import theano_mgpu are compared, with g++'s flags for the processor on disk and without. Examples:

  python benchmarks/startup.py
  python benchmarks/startup.py --models cnn --sides 'one at a time' 'two contexts'
  python benchmarks/startup.py --imports
"""
import functools
import glob
import os
import subprocess
import sys
import tempfile
import time

from turns import make_parser, ratio, spread, take_turns

PROGRAM = '''
import sys
import theano_mgpu
import keras
import numpy as np
from keras import layers as L
layers = {'mlp': [L.Dense(64, activation='relu', input_shape=(20,))],
          'cnn': [L.Conv2D(8, 3, activation='relu', input_shape=(12, 12, 1)), L.BatchNormalization(), L.MaxPooling2D(),
                  L.Flatten(), L.Dropout(0.5)]}[sys.argv[1]]
model = keras.Sequential(layers + [L.Dense(10, activation='softmax')])
if sys.argv[2] == 'contexts':
    theano_mgpu.init('dev0->cpu;dev1->cpu')
    from theano_mgpu.keras import multi_gpu_model
    model = multi_gpu_model(model)
model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
model.train_on_batch(np.ones((32,) + model.input_shape[1:]), np.zeros((32, 1)))
'''
SIDES = {'one at a time': ('plain', 1), 'plain': ('plain', 0), 'two contexts': ('contexts', 0)}


def seconds(model, side):
    """Return the seconds that one process takes; print them at once, since all processes together take minutes."""
    kind, jobs = SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        flags = 'floatX=float32,base_compiledir=%s,mgpu.compile_jobs=%d' % (folder, jobs)
        began = time.perf_counter()
        subprocess.run([sys.executable, '-c', PROGRAM, model, kind], check=True, stderr=subprocess.DEVNULL,
                       env=dict(os.environ, THEANO_FLAGS=flags, KERAS_BACKEND='theano'))
        took = time.perf_counter() - began
    print('%s: %s: %.1f s' % (model, side, took), flush=True)
    return took


def seconds_of_import(folder, kept):
    """Return the seconds of a process that imports theano_mgpu, with g++'s flags kept with compiled code or not."""
    if not kept:
        for path in glob.glob(os.path.join(folder, '*', 'processor_*.flags')):
            os.remove(path)
    began = time.perf_counter()
    subprocess.run([sys.executable, '-c', 'import theano_mgpu'], check=True,
                   env=dict(os.environ, THEANO_FLAGS='base_compiledir=' + folder))
    return time.perf_counter() - began


def compare_imports(rounds):
    with tempfile.TemporaryDirectory() as folder:
        sides = {'kept': functools.partial(seconds_of_import, folder, True),
                 'found': functools.partial(seconds_of_import, folder, False)}
        sides['found']()  # Theano compiles its own modules once
        measured = take_turns(sides, rounds)
    print('import theano_mgpu: g++\'s flags kept: %s s; found anew: %s s; kept / found: %s'
          % (spread(measured['kept']), spread(measured['found']), ratio(measured['kept'], measured['found'])))


def main():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--models', nargs='+', choices=['mlp', 'cnn'], default=['mlp', 'cnn'])
    parser.add_argument('--sides', nargs='+', choices=list(SIDES), default=list(SIDES), help='(default: all)')
    parser.add_argument('--imports', action='store_true', help='time imports alone, with code on disk')
    arguments = parser.parse_args()
    if arguments.imports:
        compare_imports(arguments.rounds)
        return
    for model in arguments.models:
        measured = take_turns({side: functools.partial(seconds, model, side) for side in arguments.sides},
                           arguments.rounds)
        first = arguments.sides[0]
        for side in arguments.sides:
            print('%s: %s: %s s; / %s: %s' % (model, side, spread(measured[side]), first,
                                              ratio(measured[side], measured[first])))


if __name__ == '__main__':
    main()
