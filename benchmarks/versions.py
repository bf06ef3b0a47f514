#!/usr/bin/env python
"""Steps, compilation, or starts, of this checkout against another one, in turns: is a change faster or slower?

Each checkout has a process of its own, which trains a block of steps when it is its turn; the ratio is the median over
the rounds of the ratio within a round. Examples:

  git worktree add ../before HEAD~1
  python benchmarks/versions.py ../before
  python benchmarks/versions.py ../before --contexts 'a->opencl0:0;b->opencl0:1' --models cnn --rounds 15
  python benchmarks/versions.py ../before --compile
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
FUNCTION = 'import theano_mgpu, theano, theano.tensor as T; x = T.vector(); theano.function([x], T.tanh(x) + 1)([0])'
STARTS = {'import': ['-c', 'import theano_mgpu'], 'Keras': ['-c', 'import theano_mgpu, keras'],
          'first function': ['-c', FUNCTION], 'launch of two': ['-m', 'theano_mgpu', 'launch', '-n', '2']}
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('other', help='a checkout to compare with')
    parser.add_argument('--models', nargs='+', choices=MODELS, default=MODELS)
    parser.add_argument('--contexts', default='dev0->cpu;dev1->cpu', help='(default %(default)s)')
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--block', type=float, default=0.5, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--compile', action='store_true',
                        help='compare the time to compile a training function, with the C code on disk')
    parser.add_argument('--start', action='store_true',
                        help='compare processes that import, make a function whose C code is on disk, or start others')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    return parser.parse_args()


def work(arguments):
    """Train as many steps, or compile as often, as each line of stdin says; print the seconds of one."""
    sys.path[:0] = [arguments.other, os.path.join(arguments.other, 'benchmarks')]  # models.py fits its own checkout
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')
    import theano_mgpu as mgpu

    from models import adam, cnn, lstm, mlp
    assert mgpu.__file__.startswith(os.path.abspath(arguments.other)), mgpu.__file__
    mgpu.init(arguments.contexts)
    name, = arguments.models
    make, shape = {'cnn': (cnn, (1, 28, 28)), 'mlp': (mlp, (784,)), 'lstm': (lstm, (20, 32)),
                   'small': (lambda: mlp(sizes=(16, 16, 10)), (16,))}[name]
    model, rng = make(), np.random.RandomState(0)

    def compile_step():
        return mgpu.training_function(model.inputs, model.loss, model.params, adam)

    batch = (rng.rand(arguments.batch_size, *shape).astype('float32'),
             rng.randint(0, 10, arguments.batch_size).astype('int32'))
    work = compile_step if arguments.compile else functools.partial(compile_step(), *batch)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            work()
        print(json.dumps((time.perf_counter() - began) / int(line)), flush=True)


def start(folder, name, arguments):
    """Return the Worker of a checkout."""
    from theano_mgpu.cli.bench.worker import Worker  # not above: a worker imports the package of its own checkout
    command = [sys.executable, os.path.abspath(__file__), os.path.abspath(folder), '--worker', '--models', name,
               '--contexts', arguments.contexts, '--batch-size', str(arguments.batch_size)]
    return Worker(folder, command + ['--compile'] * arguments.compile, dict(os.environ))


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
