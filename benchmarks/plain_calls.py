#!/usr/bin/env python
"""The overhead of `mgpu.enable` on functions that stay plain Theano: calls with and without it, in turns.

  python benchmarks/plain_calls.py
"""
import functools

import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T
from turns import compare, show


def functions():
    """Return a function without a batch, and one whose samples cannot be divided, with the arguments of a call."""
    v = theano.shared(np.random.RandomState(0).rand(300).astype('float32'))
    a = theano.shared(np.random.RandomState(1).rand(300, 300).astype('float32'))
    s, x = T.fscalar('s'), T.fmatrix('x')
    batch = np.random.RandomState(2).rand(2000, 100).astype('float32')
    w = T.dot(a, v)
    yield 'no batch (power iteration)', theano.function([s], w.sum(), updates=[(v, s * w / w.norm(2))]), (1.0,)
    yield 'coupled (sort over the samples)', theano.function([x], T.sort(x, axis=0)[:10]), (batch,)


def main():
    mgpu.init('a->cpu;b->cpu')
    without = list(functions())
    report = mgpu.enable(tell=lambda text: None)
    for (name, plain, args), (_, enabled, _) in zip(without, functions()):
        for _ in range(20):  # until it has chosen where to run
            enabled(*args)
        show(compare(functools.partial(enabled, *args), functools.partial(plain, *args), name, rounds=21, block=0.2))
    print(report)


if __name__ == '__main__':
    main()
