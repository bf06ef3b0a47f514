#!/usr/bin/env python
"""Seconds that an unchanged Theano script takes for an epoch: plain, over contexts, and over ranks, in turns.

An epoch is what the script does between two lines of its output that have the word "validation". Each side runs the
script in a process of its own; the sides take turns. The first epochs, in which functions are compiled and measured, do
not count. Examples:

  python benchmarks/theano_script.py plain launch:2
  python benchmarks/theano_script.py 'run:a->cpu' 'run:a->cpu;b->cpu'
  tests/cuda_on_cpu run .venv/bin/python benchmarks/theano_script.py 'run:a->cuda0' 'run:a->cuda0;b->cuda1'
"""
import functools
import os
import subprocess
import sys
import time

import numpy as np
from turns import make_parser, ratio, take_turns

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LENET = 'tests/programs/theano_scripts/convolutional_mlp.py --size 28 --filters 20 50 --batch 500 --train 2000' \
    ' --hidden 500'
# Run as Python would, but for the fixes without which Theano does not import.
PLAIN = 'import theano_mgpu, os, runpy, sys; sys.argv = sys.argv[1:]; ' \
    'sys.path[0] = os.path.dirname(sys.argv[0]); runpy.run_path(sys.argv[0], run_name="__main__")'


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('sides', nargs='+', help="'plain', 'run:MAP' or 'launch:RANKS'; ratios are to the first one")
    parser.add_argument('--script', default=LENET, help='with its arguments (default: the LeNet of the tests)')
    parser.add_argument('--epochs', type=int, default=8, help='of a process (default %(default)s)')
    parser.add_argument('--warm-up', type=int, default=4, help='epochs that do not count (default %(default)s)')
    parser.add_argument('--measure', action='store_true', help='without --always: functions are measured first')
    return parser.parse_args()


def command(side, arguments):
    """Return the words after ``python`` that run the script on one side."""
    kind, _, what = side.partition(':')
    always = [] if arguments.measure else ['--always']
    words = {'plain': ['-c', PLAIN], 'run': ['-m', 'theano_mgpu', 'run', '-q', '--contexts', what] + always,
             'launch': ['-m', 'theano_mgpu', 'launch', '-n', what, 'run', '-q'] + always}[kind]
    return words + arguments.script.split() + ['--epochs', str(arguments.epochs)]


def seconds_of_epochs(words):
    """Return the seconds of each epoch of one run."""
    env = dict(os.environ, PYTHONUNBUFFERED='1', PYTHONPATH=HERE,
               THEANO_FLAGS='floatX=float32,' + os.environ.get('THEANO_FLAGS', ''))
    process = subprocess.Popen([sys.executable] + words, cwd=HERE, env=env, stdout=subprocess.PIPE, text=True)
    times = [time.perf_counter() for line in process.stdout if 'validation' in line]
    if process.wait():
        sys.exit('%s ended with exit code %d' % (' '.join(words), process.returncode))
    return np.diff(times)


def measure(side, arguments):
    """Return the median seconds of an epoch of one run."""
    seconds = np.median(seconds_of_epochs(command(side, arguments))[arguments.warm_up - 1:])
    print('%s: %.3f s an epoch' % (side, seconds), flush=True)
    return seconds


def main():
    arguments = parse_arguments()
    sides = {side: functools.partial(measure, side, arguments) for side in arguments.sides}
    measured = take_turns(sides, arguments.rounds)
    for side in sides:
        print('%-30s %.3f s an epoch, ratio %s' % (side, np.median(measured[side]),
                                                   ratio(measured[side], measured[arguments.sides[0]])))


if __name__ == '__main__':
    main()
