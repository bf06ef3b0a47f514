#!/usr/bin/env python
"""The time that further contexts add to the compilation of Keras's training function of a VGG-16.

Each compilation runs in a process of its own, as when a script starts; Theano's compiled code is on disk by then. One
context and all of them take turns. Examples:

  python benchmarks/compile_once.py
  python benchmarks/compile_once.py --device opencl0:0 --device opencl0:1
"""
import argparse
import json
import os
import subprocess
import sys

import numpy as np
from turns import make_parser, ratio, take_turns

BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--device', action='append', help='of a context; give it once for each (default: 8 times cpu)')
    parser.add_argument('--width', type=float, default=0.125, help="the layers' filters and units, in relation to "
                        'VGG-16 (default %(default)s; the graph is the same)')
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    return parser.parse_args()


def vgg16(width):
    """Return VGG-16 (Simonyan and Zisserman, 2014) for images of 32x32."""
    import keras
    from keras import layers
    model = keras.Sequential([layers.InputLayer((32, 32, 3))])
    for count, filters in BLOCKS:
        for _ in range(count):
            model.add(layers.Conv2D(int(filters * width), 3, padding='same', activation='relu'))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    for units in (4096, 4096):
        model.add(layers.Dense(int(units * width), activation='relu'))
        model.add(layers.Dropout(0.5))
    model.add(layers.Dense(10, activation='softmax'))
    model.compile('adam', 'categorical_crossentropy', metrics=['accuracy'])
    return model


def worker(arguments):
    """Compile once, and print the seconds."""
    import time

    import theano_mgpu as mgpu
    mgpu.init(arguments.worker)
    from theano_mgpu.keras import multi_gpu_model
    parallel = multi_gpu_model(vgg16(arguments.width))
    start = time.perf_counter()
    parallel._make_train_function()
    print(json.dumps(time.perf_counter() - start))


def seconds(devices, arguments):
    mapped = ';'.join('dev%d->%s' % pair for pair in enumerate(devices))
    command = [sys.executable, __file__, '--worker', mapped, '--width', str(arguments.width)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=True,
                          env=dict(os.environ, THEANO_FLAGS='floatX=float32'))
    return json.loads(done.stdout.splitlines()[-1])


def main():
    arguments = parse_arguments()
    if arguments.worker:
        worker(arguments)
        return 0
    devices = arguments.device or ['cpu'] * 8
    sides = {'one': lambda: seconds(devices[:1], arguments), 'all': lambda: seconds(devices, arguments)}
    for side in sides.values():
        side()  # fills Theano's folder of compiled code
    measured = take_turns(sides, arguments.rounds, 'compiling')
    print('%d contexts (%s) %.2f s / one %.2f s = %.2f (%.2f to %.2f), %d rounds'
          % (len(devices), devices[0], np.median(measured['all']), np.median(measured['one']),
             *ratio(measured['all'], measured['one']), arguments.rounds))
    return 0


if __name__ == '__main__':
    sys.exit(main())
