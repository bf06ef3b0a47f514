#!/usr/bin/env python
"""Steps, compilation, or starts, of this checkout against another one, in turns: is a change faster or slower?

Each checkout has a process of its own, which trains a block of steps when it is its turn; the ratio is the median over
the rounds of the ratio within a round. Examples:

  git worktree add ../before HEAD~1
  python benchmarks/versions.py ../before
  python benchmarks/versions.py ../before --contexts 'a->opencl0:0;b->opencl0:1' --models cnn --rounds 15
  python benchmarks/versions.py ../before --ranks 2 --contexts 'host->cpu'
  python benchmarks/versions.py ../before --compile --models cnn resnet20 vgg16
  python benchmarks/versions.py ../before --start
"""
import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
from turns import WARM_UP, make_parser, ratio, take_turns

MODELS = ('cnn', 'mlp', 'lstm', 'small')
KERAS_MODELS = ('resnet20', 'vgg16')  # compilation only
FUNCTION = 'import theano_mgpu, theano, theano.tensor as T; x = T.vector(); theano.function([x], T.tanh(x) + 1)([0])'
STARTS = {'import': ['-c', 'import theano_mgpu'], 'Keras': ['-c', 'import theano_mgpu, keras'],
          'first function': ['-c', FUNCTION], 'launch of two': ['-m', 'theano_mgpu', 'launch', '-n', '2']}
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('other', help='a checkout to compare with')
    parser.add_argument('--models', nargs='+', choices=MODELS + KERAS_MODELS, default=MODELS, metavar='MODEL',
                        help='any of %(choices)s; the last two with --compile only (default %(default)s)')
    parser.add_argument('--contexts', default='dev0->cpu;dev1->cpu', help='(default %(default)s)')
    parser.add_argument('--ranks', type=int, default=1, metavar='N',
                        help='processes by `theano-mgpu launch`, each with these contexts and its part of the batch')
    parser.add_argument('--batch-size', type=int, default=128, help='of all ranks (default %(default)s)')
    parser.add_argument('--block', type=float, default=0.5, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--compile', action='store_true',
                        help='compare the time to compile a training function, with the C code on disk')
    parser.add_argument('--start', action='store_true',
                        help='compare processes that import, make a function whose C code is on disk, or start others')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.compile and not set(KERAS_MODELS).isdisjoint(arguments.models):
        parser.error('%s: --compile is missing; only their compilation is compared' % ' and '.join(KERAS_MODELS))
    return arguments


def work(arguments):
    """Train as many steps, or compile as often, as each line of stdin says; print the seconds of one."""
    sys.path[:0] = [arguments.other, os.path.join(arguments.other, 'benchmarks')]  # models.py fits its own checkout
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')
    import theano_mgpu as mgpu
    assert mgpu.__file__.startswith(os.path.abspath(arguments.other)), mgpu.__file__
    mgpu.init(arguments.contexts)
    name, = arguments.models
    repeated = keras_compilation(name) if name in KERAS_MODELS else theano_work(name, arguments)
    for number in numbers(arguments.ranks):
        began = time.perf_counter()
        for _ in range(number):
            repeated()
        if mgpu.rank() == 0:
            print(json.dumps((time.perf_counter() - began) / number), flush=True)


def numbers(ranks):
    """Yield the numbers on the lines of stdin, which rank 0 reads, on all ranks."""
    if ranks == 1:
        yield from map(int, sys.stdin)
        return
    from mpi4py import MPI
    while True:
        number = int(MPI.COMM_WORLD.bcast(sys.stdin.readline() if MPI.COMM_WORLD.rank == 0 else None) or 0)
        if not number:
            return
        yield number


def keras_compilation(name):
    """Return a function that compiles the training function of a model of Keras over the contexts."""
    from theano_mgpu.keras import multi_gpu_model

    import keras
    from resnet import resnet
    model = resnet(32, 16) if name == 'resnet20' else keras.applications.vgg16.VGG16(
        weights=None, input_shape=(32, 32, 3), classes=10)
    parallel = multi_gpu_model(model)

    def compile_step():
        parallel.compile('sgd', 'categorical_crossentropy')
        parallel._make_train_function()
        return parallel.train_function
    return compile_step


def theano_work(name, arguments):
    """Return a function that trains one step of a model, or compiles it."""
    import theano_mgpu as mgpu

    from models import adam, cnn, lstm, mlp
    make, shape = {'cnn': (cnn, (1, 28, 28)), 'mlp': (mlp, (784,)), 'lstm': (lstm, (20, 32)),
                   'small': (lambda: mlp(sizes=(16, 16, 10)), (16,))}[name]
    model, rng = make(), np.random.RandomState(0)

    def compile_step():
        return mgpu.training_function(model.inputs, model.loss, model.params, adam)

    n_samples = arguments.batch_size // arguments.ranks
    batch = rng.rand(n_samples, *shape).astype('float32'), rng.randint(0, 10, n_samples).astype('int32')
    return compile_step if arguments.compile else functools.partial(compile_step(), *batch)


def start(folder, name, arguments):
    """Return the Worker of a checkout."""
    from worker import Worker  # not above: a worker imports the package of its own checkout
    command = [os.path.abspath(__file__), os.path.abspath(folder), '--worker', '--models', name,
               '--contexts', arguments.contexts, '--batch-size', str(arguments.batch_size),
               '--ranks', str(arguments.ranks)] + ['--compile'] * arguments.compile
    launcher = ['-m', 'theano_mgpu', 'launch', '-n', str(arguments.ranks)] if arguments.ranks > 1 else []
    return Worker(folder, [sys.executable, *launcher, *command],
                  dict(os.environ, PYTHONPATH=os.path.abspath(folder)))


def seconds(worker, repeats):
    """Return a worker's seconds of a step, the mean of some."""
    from contest import next_number
    worker.send(str(repeats))
    return next_number(worker)


def seconds_of_start(folder, command):
    """Return the seconds of a process that has the package of a checkout."""
    began = time.perf_counter()
    subprocess.run([sys.executable] + command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   cwd=folder, env=dict(os.environ, PYTHONPATH=os.path.abspath(folder), KERAS_BACKEND='theano'))
    return time.perf_counter() - began


def compare_starts(arguments):
    with tempfile.NamedTemporaryFile(suffix='.py') as nothing:
        for name, command in STARTS.items():
            command = command + [nothing.name] * (name == 'launch of two')
            sides = {'ours': functools.partial(seconds_of_start, HERE, command),
                     'theirs': functools.partial(seconds_of_start, arguments.other, command)}
            take_turns(sides, WARM_UP)
            measured = take_turns(sides, arguments.rounds)
            print('%-14s %5.2f s / %5.2f s = %s' % (name, np.median(measured['ours']), np.median(measured['theirs']),
                                                    ratio(measured['ours'], measured['theirs'])), flush=True)


def main():
    arguments = parse_arguments()
    if arguments.worker:
        return work(arguments)
    if arguments.start:
        return compare_starts(arguments)
    print('%s of %s, batch %d, %d rounds: this checkout / the other, median (lowest to highest)'
          % ('compilation' if arguments.compile else 'steps', arguments.contexts, arguments.batch_size,
             arguments.rounds))
    for name in arguments.models:
        with start(HERE, name, arguments) as ours, start(arguments.other, name, arguments) as theirs:
            warm_up = 1 if arguments.compile else 5
            for worker in (ours, theirs):
                seconds(worker, warm_up)
            repeats = max(1, int(arguments.block / seconds(theirs, warm_up)))
            measured = take_turns({'ours': functools.partial(seconds, ours, repeats),
                                'theirs': functools.partial(seconds, theirs, repeats)}, arguments.rounds)
        print('%-6s %8.3f ms / %8.3f ms = %s'
              % (name, 1e3 * np.median(measured['ours']), 1e3 * np.median(measured['theirs']),
                 ratio(measured['ours'], measured['theirs'])), flush=True)


if __name__ == '__main__':
    sys.exit(main())
