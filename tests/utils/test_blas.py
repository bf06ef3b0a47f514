"""The BLAS of a process: its threads, and its version."""
from theano_mgpu.utils import blas

import numpy as np
import pytest
import theano
import theano.tensor as T
from threadpoolctl import threadpool_limits


@pytest.mark.needs_compiler
def test_the_library_that_theano_links_is_told_with_its_threads():
    x = T.matrix('x')
    theano.function([x], T.dot(x, x))(np.ones((3, 3), theano.config.floatX))
    if not any('openblas' in name for name in blas.loaded()):
        pytest.skip('the BLAS here is not OpenBLAS')
    for number in (2, 1):
        with threadpool_limits(number, user_api='blas'):
            for text in blas.loaded().values():
                assert text.endswith('threads=%d' % number)
