#!/usr/bin/env python
"""Seconds from the start of a process to the end of its first batch, with nothing compiled before, in turns.

Compared are plain Keras with one module of C code compiled at a time, as Theano does it; plain Keras with one for each
core; and the same for a model over two contexts. Each process has a new folder of compiled code. Examples:

  python benchmarks/startup.py
  python benchmarks/startup.py --models cnn --rounds 3
"""
import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time

from theano_mgpu.profiling.turns import ratio, spread, take_turns

import numpy as np

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


def seconds(model, kind, jobs):
    """Seconds that one process takes."""
    with tempfile.TemporaryDirectory() as folder:
        flags = 'floatX=float32,base_compiledir=%s,mgpu.compile_jobs=%d' % (folder, jobs)
        began = time.perf_counter()
        subprocess.run([sys.executable, '-c', PROGRAM, model, kind], check=True, stderr=subprocess.DEVNULL,
                       env=dict(os.environ, THEANO_FLAGS=flags, KERAS_BACKEND='theano'))
        return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=['mlp', 'cnn'], default=['mlp', 'cnn'])
    parser.add_argument('--rounds', type=int, default=7, help='processes of each kind, in turns (default %(default)s)')
    arguments = parser.parse_args()
    for model in arguments.models:
        found = take_turns({name: functools.partial(seconds, model, *how) for name, how in SIDES.items()},
                           arguments.rounds, model)
        print('%s: plain Keras, one module at a time: %s s' % (model, spread(found['one at a time'])))
        print('%s: plain Keras / the same, one module at a time: %s' % (model, ratio(found['plain'],
                                                                                  found['one at a time'])))
        print('%s: two contexts / plain Keras: %s; / one module at a time: %s'
              % (model, ratio(found['two contexts'], found['plain']),
                 ratio(found['two contexts'], found['one at a time'])))
        print('%s: medians, s: %s' % (model, ', '.join('%s %.1f' % (name, np.median(each))
                                                       for name, each in found.items())))


if __name__ == '__main__':
    main()
