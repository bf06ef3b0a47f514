#!/usr/bin/env python
"""Loops on the host that theano_mgpu has g++ make fast, against Theano's own and against copying memory.

They are in theano_mgpu/compat/theano_loops.py: the update of parameters by each optimizer of Keras, the gradient of
max pooling, in windows of 2x2, the sum over all but the last axis, of 32 values, and over all but the axis of 16
filters, as for a bias after a convolution; and a convolution by 32 filters of 3x3 with stride 2, with its gradients.
There is one value for each parameter. Both versions and a copy take turns, a block of calls each;
ratios are medians over the rounds (lowest to highest).

  ms           a call with the loops of theano_mgpu
  of Theano's  its time as part of that with Theano's loops
  bandwidth    bytes that the call reads and writes, loop by loop, a second, as part of what copying reaches

Examples:

  python benchmarks/host_loops.py
  python benchmarks/host_loops.py --parameters 20000000 --loops Adam SGD
"""
import contextlib
import functools
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu  # noqa: F401  Keras and Theano as it patches them
from theano_mgpu.compat.theano_loops import COLUMNS, LOOPING, POOLING
from theano_mgpu.utils.tables import table

import keras.backend as K
import numpy as np
import theano
import theano.tensor as T
from keras import optimizers
from theano.tensor.elemwise import CAReduce, Elemwise
from theano.tensor.nnet.corr import BaseCorrMM
from theano.tensor.signal.pool import MaxPoolGrad
from turns import WARM_UP, make_parser, ratio, seconds, spread, take_turns

OPTIMIZERS = {'SGD': optimizers.SGD, 'momentum': functools.partial(optimizers.SGD, momentum=0.9),
              'RMSprop': optimizers.RMSprop, 'Adagrad': optimizers.Adagrad, 'Adadelta': optimizers.Adadelta,
              'Adam': optimizers.Adam, 'Adamax': optimizers.Adamax, 'Nadam': optimizers.Nadam}
LOOPS = [*OPTIMIZERS, 'pooling', 'sum', 'bias', 'convolution']
REPLACED = [(Elemwise, LOOPING), (MaxPoolGrad, POOLING), (CAReduce, LOOPING), (BaseCorrMM, COLUMNS)]


def parse_arguments():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--loops', nargs='+', choices=LOOPS, default=LOOPS, metavar='NAME',
                        help='of: %s (default: all)' % ', '.join(LOOPS))
    parser.add_argument('--parameters', type=int, default=1900000, metavar='N', help='(default %(default)s)')
    parser.add_argument('--block', type=float, default=0.2, metavar='SECONDS', help='length of one side of a round')
    arguments = parser.parse_args()
    if min(arguments.parameters, arguments.rounds) < 1:
        parser.error('--parameters and --rounds are at least 1')
    return arguments


@contextlib.contextmanager
def theanos_own_loops():
    """Use the C code of Theano 1.0.5 in the ``with`` block."""
    patched = [(op, name, getattr(op, name)) for op, names in REPLACED for name in names]
    for op, name, method in patched:
        setattr(op, name, method.__wrapped__)
    try:
        yield
    finally:
        for op, name, method in patched:
            setattr(op, name, method)


def function_of(loop, n):
    """Return a function that runs a loop for n parameters, or pools or adds up n values."""
    if loop == 'pooling':
        return pooling_gradient(n)
    if loop == 'sum':
        return theano.function([], [], updates=[(K.variable(np.ones(32)), K.sum(K.variable(np.ones((-(-n // 32), 32))),
                                                                                axis=0))])
    if loop in ('bias', 'convolution'):
        images = K.variable(np.random.RandomState(0).randn(-(-n // 4096), 16, 16, 16))
        return sum_for_bias(images) if loop == 'bias' else convolution(images)
    w, gradient = K.variable(np.ones(n)), K.variable(np.ones(n))
    updates = OPTIMIZERS[loop]().get_updates(loss=K.sum(w * gradient), params=[w])
    return theano.function([], [], updates=[pair for pair in updates if isinstance(pair, tuple)])


def pooling_gradient(n):
    """Return a function that computes the gradient of max pooling over images of 28x28, about n values in all."""
    random = np.random.RandomState(0)
    values = random.randn(-(-n // 784), 1, 28, 28)
    maxima = values.reshape(-1, 1, 14, 2, 14, 2).max((3, 5))
    gradient = K.variable(values)
    inputs = [K.variable(each) for each in (values, maxima, random.randn(*maxima.shape))]
    return theano.function([], [], updates=[(gradient, MaxPoolGrad(ignore_border=True)(*inputs, (2, 2)))])


def sum_for_bias(images):
    """Return a function that adds up images with the axes as Keras has them: filters last."""
    return theano.function([], [], updates=[(K.variable(np.ones(16)), images.dimshuffle(0, 2, 3, 1).sum((0, 1, 2)))])


def convolution(images):
    """Return a function that computes a convolution and its two gradients."""
    filters = K.variable(np.random.RandomState(0).randn(32, 16, 3, 3))
    maps = T.nnet.conv2d(images, filters, border_mode='half', subsample=(2, 2), filter_flip=False)
    results = [maps, *T.grad(T.sqr(maps).sum(), [images, filters])]
    return theano.function([], [], updates=[(K.variable(np.ones((1,) * 4)), result) for result in results])


def bytes_of(function, n):
    """Return the bytes of arrays that a function's ops read and write: n elements, or n / 4 for results of pooling."""
    def elements(node, variable):
        if isinstance(node.op, CAReduce) and variable in node.outputs:
            return 32
        return n // 4 if isinstance(node.op, MaxPoolGrad) and variable in node.inputs[1:] else n
    return sum(elements(node, variable) * np.dtype(variable.type.dtype).itemsize
               for node in function.maker.fgraph.apply_nodes if isinstance(node.op, (Elemwise, MaxPoolGrad, CAReduce))
               for variable in set(node.inputs) | set(node.outputs)
               if variable.type.dtype in ('float32', 'float64') and not all(variable.type.broadcastable))


def main():
    arguments = parse_arguments()
    n, rows = arguments.parameters, []
    source, target = np.ones(5 * n, theano.config.floatX), np.ones(5 * n, theano.config.floatX)
    for name in arguments.loops:
        sides = {'ours': function_of(name, n), 'copy': lambda: np.copyto(target, source)}
        with theanos_own_loops():
            sides['own'] = function_of(name, n)
        for each in sides.values():
            seconds(each, WARM_UP)
        repeats = max(1, int(arguments.block / max(seconds(each) for each in sides.values())))
        measured = take_turns({side: functools.partial(seconds, each, repeats) for side, each in sides.items()},
                           arguments.rounds, name)
        moved = bytes_of(sides['ours'], n) / (source.nbytes + target.nbytes)
        rows.append([name, '%.2f' % (1e3 * spread(measured['ours']).median),
                     '%.2f (%.2f to %.2f)' % tuple(ratio(measured['ours'], measured['own'])),
                     '%.2f (%.2f to %.2f)' % tuple(moved * each for each in ratio(measured['copy'], measured['ours']))
                     if name != 'convolution' else ''])
    print('%d parameters, %d rounds' % (n, arguments.rounds))
    print(table([['LOOP', 'ms', "of Theano's", 'bandwidth']] + rows, right={1}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
