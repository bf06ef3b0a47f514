#!/usr/bin/env python
"""Time of a training step with logical shards, which gives the same bits on any number of devices, against without.

The models are a small CNN and an MLP (1.86 million parameters), each with and without dropout, the optimizer Adam. The
sides take turns. With logical shards the BLAS of the host computes in one thread; so it does on the other side, unless
--threads gives another number.

Examples:

  python benchmarks/logical_shards.py                  one context on the CPU
  python benchmarks/logical_shards.py --threads 2      against a BLAS with two threads
  python benchmarks/logical_shards.py --cpu            on a machine that others use
  theano-mgpu launch -n 2 benchmarks/logical_shards.py
"""
import functools
import os
import sys
import time

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.utils import blas

import numpy as np
import theano
from models import adam, cnn, mlp
from theano.sandbox.rng_mrg import MRG_RandomStreams
from turns import make_parser, ratio, seconds, spread, take_turns


def with_dropout(model, rate=0.5):
    """Return the loss of a model whose input has dropout."""
    x = model.inputs[0]
    kept = MRG_RandomStreams(5).binomial(x.shape, p=1 - rate, dtype=x.dtype) / np.float32(1 - rate)
    return theano.clone(model.loss, {x: x * kept})


def training(make, dropout, logical_shards):
    with theano.configparser.change_flags(**{'mgpu.logical_shards': logical_shards}):
        model = make()
        loss = with_dropout(model) if dropout else model.loss
        return mgpu.training_function(model.inputs, loss, model.params, adam)


def compared(make, shape, dropout, args):
    """Return the seconds of a step, a list for each number of logical shards."""
    rng = np.random.RandomState(0)
    batch = rng.rand(args.batch, *shape).astype('float32'), rng.randint(0, 10, args.batch).astype('int32')
    steps = {number: training(make, dropout, number) for number in (0, args.shards)}
    for step in steps.values():
        seconds(lambda step=step: step(*batch), 3)
    repeats = max(1, int(args.seconds / seconds(lambda: steps[0](*batch), 3)))
    if mgpu.size() > 1:
        from mpi4py import MPI
        repeats = MPI.COMM_WORLD.bcast(repeats)

    def turn(number):
        blas.use_threads(1 if number else args.threads)
        return seconds(lambda: steps[number](*batch), repeats, time.process_time if args.cpu else time.perf_counter)
    return take_turns({number: functools.partial(turn, number) for number in steps}, args.rounds)


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--shards', type=int, default=8, help='logical shards (default: 8)')
    parser.add_argument('--batch', type=int, default=128, help='samples of a batch (default: 128)')
    parser.add_argument('--threads', type=int, default=1, help='threads of BLAS without logical shards (default: 1)')
    parser.add_argument('--seconds', type=float, default=.5, help='seconds of a turn, about (default: 0.5)')
    parser.add_argument('--cpu', action='store_true', help='count the time of the processor, over all threads')
    args = parser.parse_args()
    mgpu.init()
    for name, make, shape in (('MLP', mlp, (784,)), ('CNN', cnn, (1, 28, 28))):
        for dropout in (False, True):
            times = compared(make, shape, dropout, args)
            if mgpu.rank() == 0:
                print('%s%s, batch %d: %.2f ms, %d logical shards %.2f ms: %s'
                      % (name, ' with dropout' * dropout, args.batch, 1e3 * spread(times[0]).median, args.shards,
                         1e3 * spread(times[args.shards]).median, ratio(times[args.shards], times[0])), flush=True)


if __name__ == '__main__':
    sys.exit(main())
