#!/usr/bin/env python
r"""A logistic regression by L-BFGS, whose data set is a shared variable inside of the function: `f(theta)`.

Without options, one process of plain Theano and ranks take turns; each turn is a process, or a job, of its own. The
calls that compile do not count. A ratio below 1 means that the ranks are faster. With `--devices`, in a process on the
CUDA stand-in, the most memory that each device has had, and the bytes that a call copies from and to the devices, by
the stand-in's trace. Examples:

  python benchmarks/data_sets.py
  python benchmarks/data_sets.py --rows 100000 --ranks 2 --rounds 9
  THEANO_FLAGS='contexts=a->cuda0;b->cuda1,gpuarray.preallocate=-1' .venv/bin/python tests/cuda_on_cpu run \
    --devices 2 --set TRACE=/tmp/trace .venv/bin/python benchmarks/data_sets.py --devices
"""
import collections
import functools
import os
import re
import subprocess
import sys
import time

import numpy as np
from turns import make_parser, ratio, spread, take_turns

HERE = os.path.dirname(os.path.abspath(__file__))
WARM_UP = 12  # calls that do not count
CALLS = 20


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--rows', type=int, default=1000000, help='of the data set (default %(default)s)')
    parser.add_argument('--columns', type=int, default=20, help='of the data set (default %(default)s)')
    parser.add_argument('--ranks', type=int, default=2, help='processes (default %(default)s)')
    parser.add_argument('--devices', action='store_true', help='memory and copies of the devices of this process')
    parser.add_argument('--one', action='store_true', help='print the seconds of one turn: this process is a side')
    return parser.parse_args()


def make(arguments):
    """Return the cost and its gradient, as a function of the parameters."""
    import theano
    import theano.tensor as T
    rng = np.random.RandomState(0)
    rows, truth = rng.randn(arguments.rows, arguments.columns), rng.randn(arguments.columns)
    labels = rng.rand(arguments.rows) < 1 / (1 + np.exp(-rows.dot(truth)))
    x, y, theta = theano.shared(rows, 'X'), theano.shared(labels.astype('float64'), 'y'), T.dvector('theta')
    score = T.dot(x, theta[:-1]) + theta[-1]
    cost = (T.nnet.softplus(score) - y * score).mean() + 1e-4 * T.sqr(theta).sum()
    return theano.function([theta], [cost, T.grad(cost, theta)], name='cost')


def minimise(arguments):
    """Print the seconds of a minimisation, its calls, and the lowest cost."""
    import theano_mgpu as mgpu

    from scipy.optimize import fmin_l_bfgs_b
    f, start = make(arguments), np.zeros(arguments.columns + 1)
    for _ in range(WARM_UP):
        f(start)
    began = time.perf_counter()
    _, lowest, about = fmin_l_bfgs_b(f, start, maxiter=15, factr=0, pgtol=0)
    if mgpu.rank() == 0:
        print('seconds %r calls %d lowest %.15g' % (time.perf_counter() - began, about['funcalls'], lowest), flush=True)


def turn(words, arguments, lowest):
    """Return the milliseconds of a call in a minimisation by a process, or a job, of its own."""
    words = [sys.executable, *words, os.path.abspath(__file__), '--one', '--rows', str(arguments.rows),
             '--columns', str(arguments.columns)]
    env = dict(os.environ, PYTHONPATH=os.path.dirname(HERE))
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    found = re.search(r'seconds (\S+) calls (\d+) lowest (\S+)', done.stdout)
    if done.returncode or not found:
        sys.exit(done.stdout + done.stderr)
    lowest.add(found[3])
    milliseconds = float(found[1]) / int(found[2]) * 1e3
    print('%-30s %.2f ms a call' % (' '.join(words[1:-6]) or 'plain', milliseconds), flush=True)
    return milliseconds


def compare(arguments):
    ranks = ['-m', 'theano_mgpu', 'launch', '-n', str(arguments.ranks), 'run', '-q', '--always']
    lowest = set()
    sides = {'plain': [], 'ranks': ranks}
    measured = take_turns({name: functools.partial(turn, words, arguments, lowest) for name, words in sides.items()},
                          arguments.rounds)
    for name in sides:
        print('%s: %s ms a call' % (name, spread(measured[name])))
    print('ranks / plain: %s' % (ratio(measured['ranks'], measured['plain']),))
    print('lowest cost of each turn: ' + ', '.join(sorted(lowest)))


def measure_devices(arguments):
    import theano_mgpu as mgpu
    report = mgpu.enable(always=True)
    sys.path.insert(0, os.path.join(HERE, os.pardir, 'tests'))
    from support.device_memory import peaks
    f, theta, trace = make(arguments), np.zeros(arguments.columns + 1), os.environ['CUDA_ON_CPU_TRACE']
    for _ in range(3):
        f(theta)
    one = arguments.rows * (arguments.columns + 1) * 8
    print('one copy of the data: %.1f MB' % (one / 1e6))
    for device, peak in enumerate(peaks(len(report.usages[0].contexts))):
        print('device %d: at most %.1f MB, %.3f of one copy' % (device, peak / 1e6, peak / one))
    before = os.path.getsize(trace)
    for _ in range(CALLS):
        f(theta)
    with open(trace) as file:
        file.seek(before)
        copies = re.findall(r'(HtoD|DtoH) dev(\d+) (\d+)', file.read())
    for way, text in (('HtoD', 'to'), ('DtoH', 'from')):
        for device in sorted({device for _, device, _ in copies}):
            sizes = collections.Counter(int(size) for *key, size in copies if key == [way, device])
            print('a call copies %s device %s: %s' % (text, device, ', '.join(
                '%g times %d bytes' % (number / CALLS, size) for size, number in sorted(sizes.items())) or 'nothing'))
    print(report)


if __name__ == '__main__':
    arguments = parse_arguments()
    (measure_devices if arguments.devices else minimise if arguments.one else compare)(arguments)
