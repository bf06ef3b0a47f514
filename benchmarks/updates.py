#!/usr/bin/env python
"""The update of parameters on the host, by each optimizer of Keras, against Theano's own and against copying memory.

theano_mgpu has g++ vectorise the loops of Theano's elementwise ops (theano_mgpu/patches/theano_elemwise.py). Both
versions and a copy take turns, a block of calls each; ratios are medians over the rounds (lowest to highest).

  ms           an update with vectorised loops
  of Theano's  the time of the update as part of that without
  bandwidth    bytes that an update reads and writes, loop by loop, a second, as part of what copying reaches

Examples:

  python benchmarks/updates.py
  python benchmarks/updates.py --parameters 20000000 --optimizers Adam SGD
"""
import argparse
import contextlib
import functools
import os
import sys

if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu  # noqa: F401  Keras and Theano as it patches them
from theano_mgpu.patches.theano_elemwise import PATCHED
from theano_mgpu.profiling.turns import WARM_UP, ratio, seconds, spread, take_turns
from theano_mgpu.utils.tables import table

import keras.backend as K
import numpy as np
import theano
from keras import optimizers
from theano.tensor.elemwise import Elemwise

OPTIMIZERS = {'SGD': optimizers.SGD, 'momentum': functools.partial(optimizers.SGD, momentum=0.9),
              'RMSprop': optimizers.RMSprop, 'Adagrad': optimizers.Adagrad, 'Adadelta': optimizers.Adadelta,
              'Adam': optimizers.Adam, 'Adamax': optimizers.Adamax, 'Nadam': optimizers.Nadam}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--optimizers', nargs='+', choices=list(OPTIMIZERS), default=list(OPTIMIZERS), metavar='NAME',
                        help='of: %s (default: all)' % ', '.join(OPTIMIZERS))
    parser.add_argument('--parameters', type=int, default=1900000, metavar='N', help='(default %(default)s)')
    parser.add_argument('--rounds', type=int, default=9, help='rounds that count (default %(default)s)')
    parser.add_argument('--block', type=float, default=0.2, metavar='SECONDS', help='length of one side of a round')
    arguments = parser.parse_args()
    if min(arguments.parameters, arguments.rounds) < 1:
        parser.error('--parameters and --rounds are at least 1')
    return arguments


@contextlib.contextmanager
def theanos_own_loops():
    """A block in which Theano's C code is that of Theano 1.0.5."""
    patched = {name: getattr(Elemwise, name) for name in PATCHED}
    for name, method in patched.items():
        setattr(Elemwise, name, method.__wrapped__)
    try:
        yield
    finally:
        for name, method in patched.items():
            setattr(Elemwise, name, method)


def update_of(name, n):
    """A function that updates n parameters, with a gradient of ones."""
    w, gradient = K.variable(np.ones(n)), K.variable(np.ones(n))
    updates = OPTIMIZERS[name]().get_updates(loss=K.sum(w * gradient), params=[w])
    return theano.function([], [], updates=[pair for pair in updates if isinstance(pair, tuple)])


def bytes_of(function, n):
    """What the elementwise ops of a function read and write of arrays with n elements."""
    return sum(variable.type.dtype in ('float32', 'float64') and variable.type.ndim > 0 and
               not all(variable.type.broadcastable) and n * np.dtype(variable.type.dtype).itemsize
               for node in function.maker.fgraph.apply_nodes if isinstance(node.op, Elemwise)
               for variable in set(node.inputs) | set(node.outputs))


def main():
    arguments = parse_arguments()
    n, rows = arguments.parameters, []
    source, target = np.ones(5 * n, theano.config.floatX), np.ones(5 * n, theano.config.floatX)
    for name in arguments.optimizers:
        sides = {'vectorised': update_of(name, n), 'copy': lambda: np.copyto(target, source)}
        with theanos_own_loops():
            sides['own'] = update_of(name, n)
        for each in sides.values():
            seconds(each, WARM_UP)
        repeats = max(1, int(arguments.block / max(seconds(each) for each in sides.values())))
        found = take_turns({side: functools.partial(seconds, each, repeats) for side, each in sides.items()},
                           arguments.rounds, name)
        moved = bytes_of(sides['vectorised'], n) / (source.nbytes + target.nbytes)
        rows.append([name, '%.2f' % (1e3 * spread(found['vectorised']).median),
                     '%.2f (%.2f to %.2f)' % tuple(ratio(found['vectorised'], found['own'])),
                     '%.2f (%.2f to %.2f)' % tuple(moved * each for each in ratio(found['copy'], found['vectorised']))])
    print('%d parameters, %d rounds' % (n, arguments.rounds))
    print(table([['OPTIMIZER', 'ms', "of Theano's", 'bandwidth']] + rows, right={1}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
