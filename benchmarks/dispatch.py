#!/usr/bin/env python
"""The cost of a batch for a model that enable() divides, against plain Keras, for 1 to 4,096 samples, in turns.

Each takes a batch by predict_on_batch, and by train_on_batch with Adam. The contexts come from the flag `contexts`, or
are two on the CPU; one in each of several processes. There, plain Keras computes the same batch in each. Examples:

  python benchmarks/dispatch.py
  python benchmarks/dispatch.py --always                                   every batch is divided
  theano-mgpu launch -n 2 benchmarks/dispatch.py                           over two processes
  python tests/cuda_on_cpu run --devices 2 python benchmarks/dispatch.py --map 'dev0->cuda0;dev1->cuda1'
"""
import functools
import os

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.auto.choice import COUNTED, WARM_UP
from theano_mgpu.comm.collectives import all_gather_int
from theano_mgpu.comm.mpi import choose_ranks
from theano_mgpu.keras import disable, enable

import keras
import numpy as np
from keras.layers import Dense
from turns import make_parser, ratio, seconds, take_turns

BLOCK = 0.03  # seconds that a side has in its turn, about


def compiled():
    """Return a compiled model of 20 features, 32 units and 10 classes."""
    model = keras.Sequential([Dense(32, activation='relu', input_shape=(20,)), Dense(10, activation='softmax')])
    model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    return model


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--map', help="contexts, e.g. 'dev0->cuda0;dev1->cuda1' (default: the flag, or two on the CPU)")
    parser.add_argument('--batch-sizes', type=int, nargs='+', default=[1, 8, 32, 128, 512, 2048, 4096])
    parser.add_argument('--always', action='store_true', help='divide every batch')
    arguments = parser.parse_args()
    on_cpu = 'a->cpu' if mgpu.size() > 1 else 'a->cpu;b->cpu'
    mgpu.init(arguments.map or (None if 'contexts=' in os.environ['THEANO_FLAGS'] else on_cpu))
    ranks = choose_ranks(None)

    def turn(call, repeats):
        all_gather_int(ranks, 0)  # all begin together
        return seconds(call, repeats)
    plain = compiled()
    enable(always=arguments.always)
    enabled = compiled()
    disable()
    rng = np.random.RandomState(0)
    for method in ('predict_on_batch', 'train_on_batch'):
        for size in arguments.batch_sizes:
            batch = rng.rand(size, 20).astype('float32'), rng.randint(0, 10, (size, 1))
            batch = batch[:1] if method == 'predict_on_batch' else batch
            sides = {name: functools.partial(getattr(model, method), *batch)
                     for name, model in (('enabled', enabled), ('plain', plain))}
            for call in sides.values():
                for _ in range(2 * (WARM_UP + COUNTED) + 1):  # compiles, and measures which side is faster
                    call()
            repeats = max(all_gather_int(ranks, max(1, int(BLOCK / seconds(sides['plain'], 3)))))
            measured = take_turns({name: functools.partial(turn, call, repeats) for name, call in sides.items()},
                               arguments.rounds, '%s %d' % (method, size))
            print('%s, %d samples: enabled %.3f ms, plain Keras %.3f ms; ratio %s'
                  % (method, size, np.median(measured['enabled']) * 1e3, np.median(measured['plain']) * 1e3,
                     ratio(measured['enabled'], measured['plain'])))


if __name__ == '__main__':
    main()
