"""Numbers of Theano's scalar type, such as bounds of slices, that one stage hands to the next; C code reads them."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T

BOUNDS = {'half': lambda a: a[:a.shape[0] // 2], 'fewer': lambda a: a[:a.shape[0] - 4],
          'last': lambda a: a[a.shape[0] // 2:],
          'length': lambda a: T.stack([a.shape[0] // 2, a[:a.shape[0] // 2].shape[0]])}


@pytest.mark.slow_but_with('last')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('bound', BOUNDS)
def test_a_bound_of_gathered_rows_is_the_number(bound, cpu2):
    """The slice was all rows, or none, without a word: C code read garbage of an array in the place of the number."""
    x, w = T.matrix('x'), theano.shared(np.ones((3, 4), theano.config.floatX), 'w')
    values = np.arange(36).reshape(12, 3).astype(theano.config.floatX) / 36
    result = BOUNDS[bound](T.nnet.softmax(T.dot(x, w))).sum()
    expected = theano.function([x], result, mode='FAST_RUN')(values)
    report = mgpu.enable(always=True, tell=str)
    try:
        found = theano.function([x], result, mode='FAST_RUN')(values)
    finally:
        mgpu.disable()
    np.testing.assert_allclose(found, expected, 1e-6)
    assert len(report.usages[0].contexts) == 2
