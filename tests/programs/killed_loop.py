"""A loop over Theano functions, with dropout, early stopping and a drawn order: killed after a number of calls.

    python killed_loop.py FOLDER CALLS [enable | parallel | training] [SIGNAL]

With the number of a signal, the last rank gets it in place of a kill, and no other checkpoint is due.
"""
import os
import sys

import theano_mgpu as mgpu
from theano_mgpu.utils.values import digest

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.shared_randomstreams import RandomStreams

N, BATCH = 44, 8


def functions(kind):
    rng = np.random.RandomState(0)
    data, labels = rng.randn(N, 6), rng.randint(0, 3, N)
    x, y, drawn = T.dmatrix('x'), T.lvector('y'), RandomStreams(3)
    w, v = theano.shared(rng.randn(6, 5), 'w'), theano.shared(rng.randn(5, 3), 'v')
    hidden = T.tanh(T.dot(x, w))
    dropped = hidden * drawn.binomial(hidden.shape, p=.5, dtype='float64')
    loss, error = (T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(h, v)), y).mean() for h in (dropped, hidden))
    rate, moments = theano.shared(.2, 'rate'), [theano.shared(0 * each.get_value()) for each in (w, v)]

    def updates(gradients):
        new = [.9 * m + g for m, g in zip(moments, gradients)]
        return [*zip(moments, new), *((p, p - rate * m) for p, m in zip((w, v), new))]
    if kind == 'training':
        train = mgpu.training_function([x, y], loss, [w, v], updates, outputs=[hidden.mean()])
    else:
        make = mgpu.function if kind == 'parallel' else theano.function
        train = make([x, y], [loss, hidden.mean()], updates=updates(T.grad(loss, [w, v])))
    valid = (mgpu.function if kind == 'parallel' else theano.function)([x, y], {'error': error, 'rows': hidden[:, 0]})
    return data, labels, train, valid, rate, (w, v, *moments)


def run(folder, calls, kind, number=0):
    mgpu.init('a->cpu;b->cpu')
    if kind == 'enable':
        mgpu.enable(tell=str)
    np.random.seed(5)
    data, labels, train, valid, rate, weights = functions(kind)
    checkpoint = mgpu.Checkpoint(folder, [train, valid], every=1000 if number else 3)
    best, patience, seen, computed = np.inf, 0, [], 0
    for _ in range(6):
        order = np.random.permutation(N)
        for i in range(0, N, BATCH):
            rows = order[i:i + BATCH]
            was_replaying = checkpoint.replaying
            seen.append(train(data[rows], labels[rows]))
            computed += not was_replaying
            if calls and computed == calls and not number:
                os._exit(3)
            if calls and computed == calls and mgpu.rank() == mgpu.size() - 1:
                os.kill(os.getpid(), number)
        found = valid(data, labels)
        seen.append(found['rows'])
        if found['error'] < best:
            best, patience = found['error'], 0
        else:
            patience += 1
            rate.set_value(rate.get_value() * .5)
        if patience == 3:
            break
    print(digest([seen, best, np.random.rand(), [each.get_value() for each in weights]]), checkpoint.completed)
    print('computed', computed, file=sys.stderr)


if __name__ == '__main__':
    run(sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ['plain'])[0], *map(int, sys.argv[4:]))
