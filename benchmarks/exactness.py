#!/usr/bin/env python
"""The cost of exactness: training steps with the results of one device, against steps with a flag that gives them up.

The model is a ResNet-20: batch normalisation by the whole batch, against mgpu.batch_statistics=local. Both take turns,
and so does a single context where there is one process. With several processes all do each step together.

Examples:

  python benchmarks/exactness.py --contexts 'a->opencl0:0;b->opencl0:1'
  python tests/cuda_on_cpu run python benchmarks/exactness.py --contexts 'a->cuda0;b->cuda1'
  theano-mgpu launch -n 2 benchmarks/exactness.py
"""
import functools
import os
import sys
import time

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
from keras import layers
from theano.configparser import change_flags
from turns import make_parser, ratio, seconds, take_turns


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--contexts', default='a->cpu;b->cpu', help='(default %(default)s)')
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--size', type=int, default=16, help='pixels of an image, across (default %(default)s)')
    parser.add_argument('--filters', type=int, default=16, help='of the first layers (default %(default)s)')
    parser.add_argument('--steps', type=int, default=2, help='of each side in a round (default %(default)s)')
    return parser.parse_args()


def resnet(size, filters, channels=3, blocks=3):
    """Return ResNet-20 for small images (He et al., Deep residual learning for image recognition, 2015, 4.2)."""
    def normalised(x, n, strides=1, width=3):
        return layers.BatchNormalization()(layers.Conv2D(n, width, strides=strides, padding='same', use_bias=False)(x))
    image = layers.Input((size, size, channels))
    x = layers.Activation('relu')(normalised(image, filters))
    for stage in range(3):
        n = filters << stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            y = layers.Activation('relu')(normalised(x, n, strides))
            shortcut = normalised(x, n, strides, width=1) if strides > 1 else x
            x = layers.Activation('relu')(layers.add([normalised(y, n), shortcut]))
    return keras.Model(image, layers.Dense(10, activation='softmax')(layers.GlobalAveragePooling2D()(x)))


def trained(arguments, flags, gpus=None):
    """Return a model, and the seconds that its train function took to compile."""
    with change_flags(**flags):
        np.random.seed(0)
        model = multi_gpu_model(resnet(arguments.size, arguments.filters), gpus=gpus)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), 'categorical_crossentropy')
        began = time.perf_counter()
        model._make_train_function()
        return model, time.perf_counter() - began


def main():
    arguments = parse_arguments()
    mgpu.init(arguments.contexts)
    rng = np.random.RandomState(0)
    x = rng.rand(arguments.batch_size, arguments.size, arguments.size, 3).astype('float32')
    y = np.eye(10, dtype='float32')[rng.randint(0, 10, arguments.batch_size)]
    sides = {'exact': trained(arguments, {}), 'local': trained(arguments, {'mgpu.batch_statistics': 'local'})}
    if mgpu.size() == 1:
        sides['one context'] = trained(arguments, {}, gpus=1)
    steps = {name: functools.partial(model.train_on_batch, x, y) for name, (model, _) in sides.items()}
    for step in steps.values():
        seconds(step, arguments.steps)  # builds kernels
    measured = take_turns({name: functools.partial(seconds, step, arguments.steps) for name, step in steps.items()},
                       arguments.rounds)
    if mgpu.rank():
        return 0
    print('ResNet-20: %s, %d processes, batch %d, images of %d, %d filters; medians of %d rounds'
          % (arguments.contexts, mgpu.size(), arguments.batch_size, arguments.size, arguments.filters,
             arguments.rounds))
    for name, (model, compiled_in) in sides.items():
        stages = len(model.train_function.function.plan.stages)
        print('%-12s %8.1f ms a step, %2d stages, compiled in %.1f s' % (name, 1e3 * np.median(measured[name]), stages,
                                                                       compiled_in))
    for name in list(sides)[1:]:
        print('exact / %-12s %s' % (name, ratio(measured['exact'], measured[name])))
    return 0


if __name__ == '__main__':
    sys.exit(main())
