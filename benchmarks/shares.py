#!/usr/bin/env python
"""Time of a training step over devices of unequal speed, with equal shares of a batch and with shares by speed.

The models are an MLP of four layers (4.0 million parameters with 1024 units) and a small CNN, the optimizer gradient
descent. The bound is the time of a step if the devices' speeds added up: each device trains whole batches alone, and
the speeds are these times' inverses. "part of the bound" is 1 where nothing is lost. The sides take turns.

On the CUDA stand-in a device can be slowed down; as many devices as the host has cores compute at full speed.

Examples:

  python tests/cuda_on_cpu run --set SLOWNESS='1;3' python benchmarks/shares.py
  python tests/cuda_on_cpu run --set SLOWNESS='1;3' theano-mgpu launch -n 2 benchmarks/shares.py
  python tests/cuda_on_cpu run python benchmarks/shares.py      devices of one speed: what measuring costs
"""
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices.context_map import default_map

import numpy as np
import theano
from models import cnn, mlp, sgd
from turns import largest_difference, make_parser, ratio, seconds, spread, take_turns


def training(model, shares='equal', **options):
    with theano.configparser.change_flags(**{'mgpu.shares': shares}):
        return mgpu.training_function(model.inputs, model.loss, model.params, sgd, name=shares, **options)


def summed(values):
    """Return the sums of values over the ranks."""
    if mgpu.size() == 1:
        return values
    from mpi4py import MPI
    return MPI.COMM_WORLD.allreduce(np.array(values)).tolist()


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--devices', type=int, default=2, help='number of devices, without launch (default: 2)')
    parser.add_argument('--model', choices=('mlp', 'cnn'), default='mlp', help='default: mlp')
    parser.add_argument('--units', type=int, default=1024, help='units of a layer (default: 1024)')
    parser.add_argument('--batch', type=int, default=512, help='samples of a batch (default: 512)')
    parser.add_argument('--steps', type=int, default=4, help='steps of a turn (default: 4)')
    args = parser.parse_args()
    contexts = mgpu.init() if mgpu.size() > 1 else mgpu.init(default_map('cuda%d' % i for i in range(args.devices)))
    rng = np.random.RandomState(0)
    shape = (784,) if args.model == 'mlp' else (1, 28, 28)
    batch = rng.rand(args.batch, *shape).astype('float32'), rng.randint(0, 10, args.batch).astype('int32')
    models = [mlp(sizes=(784,) + 4 * (args.units,) + (10,)) if args.model == 'mlp' else cnn()
              for _ in range(2 + len(contexts))]
    alone = {context.name: training(model, executor='serial', contexts=[context.name])
             for model, context in zip(models[2:], contexts)}
    equal, auto = training(models[0]), training(models[1], 'auto')
    for _ in range(80):  # until shares have settled
        auto(*batch)
    for ours, theirs in zip(models[0].params, models[1].params):
        ours.set_value(theirs.get_value())
    for _ in range(3):
        equal(*batch), auto(*batch)
    difference = largest_difference(models[0].params, models[1].params)
    sides = {**alone, 'equal': equal, 'auto': auto}
    times = take_turns({name: lambda step=step: seconds(lambda: step(*batch), args.steps)
                        for name, step in sides.items()}, args.rounds, 'shares')
    speeds = summed([sum(1 / times[name][i] for name in alone) for i in range(args.rounds)])
    if mgpu.rank() == 0:
        shares = auto.built.splitter.shares
        print('shares %s of %d samples; weights differ by %.1e of their largest'
              % (' + '.join(map(str, shares.sizes([args.batch]))), args.batch, difference))
        for name, each in times.items():
            print('%-8s %8.1f ms' % (name, 1e3 * spread(each).median))
        for name in ('equal', 'auto'):
            print('%-5s part of the bound: %s' % (name, spread([1 / (time * speed) for time, speed
                                                                in zip(times[name], speeds)])))
        print('auto / equal: %s' % (ratio(times['auto'], times['equal']),))
    return difference > 1e-4


if __name__ == '__main__':
    sys.exit(main())
