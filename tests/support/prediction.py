"""Predictors of tests."""
import time

import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T

FAST = theano.Mode(optimizer='fast_compile')


def sums(_, **options):
    """Return a Predictor of the sums of rows, times a shared variable."""
    x, w = T.matrix('x'), theano.shared(np.float32(1), name='w')
    return mgpu.Predictor([x], x.sum(axis=1) * w, mode=FAST, **options), w


def rows(n, value=1.0):
    return np.full((n, 3), value, theano.config.floatX)


def slow_down(predictor, seconds):
    compute = predictor._function.compute
    predictor._function.compute = lambda *args: (time.sleep(seconds), compute(*args))[1]
