"""Maxima and minima of batches with NaN, against plain Theano's on the host; also a program, for jobs of ranks."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T

N = 12  # samples


def values(x):
    """Return values that reduce over the samples, once or in several stages."""
    highest, lowest = x.max(axis=0), x.min(axis=0)
    largest, place = T.max_and_argmax(x, axis=1)
    return [highest, lowest, x.max(), x.min(), -(-x).max(axis=0), T.ptp(x, axis=0),
            ((x - lowest) / highest).max(axis=1), T.nnet.softmax(x.T).T, T.switch(T.isnan(x), 0, x).max(axis=0),
            T.grad(x.max() + lowest.sum(), x), largest + place, T.maximum(x, 0).sum(axis=0)]


def batches():
    """Yield batches with NaN in a sample of each part, in two columns or in one."""
    for row in (0, N // 2, N - 1):
        for columns in ([0, 2], [1]):
            batch = np.random.RandomState(row).randn(N, 3).astype('float32')
            batch[row, columns] = np.nan
            yield batch


def check(mode=None, **options):
    """Compare each value with plain Theano's on the host; return the function over contexts."""
    x = T.fmatrix('x')
    plain = theano.compile.get_mode(mode or theano.config.mode).excluding('gpuarray', 'gpuarray_opt')
    expected, found = theano.function([x], values(x), mode=plain), mgpu.function([x], values(x), mode=mode, **options)
    n_nan = 0
    for batch in batches():
        for ours, theirs in zip(found(batch), expected(batch)):
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)
            n_nan += np.isnan(theirs).sum()
    assert n_nan > 100
    return found


if __name__ == '__main__':
    check()
