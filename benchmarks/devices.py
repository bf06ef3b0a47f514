#!/usr/bin/env python
"""One CUDA device against two in one process, with the same batch.

Without an NVIDIA GPU tests/cuda_on_cpu stands in, and each device has a thread of its own for kernels. This
measures how well the package keeps two devices busy, not the speed of GPUs. Both sides of a ratio take turns, a block
of steps each; the ratio is the median over the rounds of the ratio within a round. Examples:

  python benchmarks/devices.py
  python benchmarks/devices.py --models mlp --executors threads --timeline mlp.json
  python benchmarks/devices.py --device cuda0 --device cuda2 --batch-size 512
"""
import functools
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices import discovery
from theano_mgpu.utils.executors import make_executor

import numpy as np
from models import adam, cnn, lstm, mlp, sgd
from turns import compare, make_parser, show, write_json

STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, 'tests', 'cuda_on_cpu')
MODELS = {'cnn': (cnn, (1, 28, 28), adam),
          'mlp': (functools.partial(mlp, sizes=(784, 512, 512, 10)), (784,), sgd),
          'lstm': (lstm, (20, 32), adam)}


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('--models', nargs='+', choices=sorted(MODELS), default=['cnn', 'mlp', 'lstm'])
    parser.add_argument('--executors', nargs='+', choices=['serial', 'threads'], default=['serial', 'threads'])
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--block', type=float, default=1.0, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--device', action='append', help='one of the two devices; give it twice')
    parser.add_argument('--timeline', metavar='FILE', help='record 20 steps of the last model on two devices')
    parser.add_argument('--json', metavar='FILE')
    return parser.parse_args()


def step_on(contexts, make_model, updates):
    model = make_model()
    return mgpu.training_function(model.inputs, model.loss, model.params, updates, contexts=contexts)


def phases(step, batch, calls=20):
    """Return the milliseconds a step of each phase."""
    step.timings.reset()
    for _ in range(calls):
        step(*batch)
    return {name: round(1e3 * seconds, 2) for name, seconds in step.timings.per_call().items() if seconds > 1e-5}


def without_exchange(make_model, updates, batch):
    """Return a step of two models, one on each device, on half the batch each."""
    half = [array[:len(array) // 2] for array in batch]
    steps = [functools.partial(step_on([name], make_model, updates), *half) for name in ('dev0', 'dev1')]
    return functools.partial(make_executor('threads', 2).run, steps)


def measure(arguments):
    """Return a row for each model and executor; print two devices with the time of their phases."""
    rng = np.random.RandomState(0)
    devices = arguments.device or discovery.discover('cuda')[0]
    mgpu.init('dev0->%s;dev1->%s' % tuple((devices * 2)[:2]))
    for name in arguments.models:
        make_model, shape, updates = MODELS[name]
        batch = (rng.rand(arguments.batch_size, *shape).astype('float32'),
                 rng.randint(0, 10, arguments.batch_size).astype('int32'))
        one, two = (step_on(names, make_model, updates) for names in (['dev0'], ['dev0', 'dev1']))
        row = compare(functools.partial(one, *batch), without_exchange(make_model, updates, batch),
                      '%s: one device / two, no exchange' % name, arguments.rounds, arguments.block)
        show(row)
        yield row
        for executor in arguments.executors:
            two.executable.launcher.executor = make_executor(executor, 2)
            row = compare(functools.partial(one, *batch), functools.partial(two, *batch),
                          '%s: one device / two, %s' % (name, executor), arguments.rounds, arguments.block)
            row['phases'] = phases(two, batch)
            show(row)
            print('    ms a step: %s' % ', '.join('%s %s' % pair for pair in row['phases'].items()))
            yield row
    if arguments.timeline:
        with mgpu.timeline(arguments.timeline):
            for _ in range(20):
                two(*batch)


def main():
    arguments = parse_arguments()
    if not discovery.discover('cuda')[0]:
        if 'CUDA_ON_CPU_DEVICES' in os.environ:
            sys.exit('the CUDA stand-in shows no device: %s' % discovery.discover('cuda')[1])
        print('no CUDA device here: taking two of tests/cuda_on_cpu', flush=True)
        os.execv(sys.executable, [sys.executable, STAND_IN, 'run', sys.executable] + sys.argv)
    print('batch %d, %d rounds, median (lowest to highest)' % (arguments.batch_size, arguments.rounds))
    rows = list(measure(arguments))
    write_json(rows, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
