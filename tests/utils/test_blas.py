"""The BLAS of a process: its threads, and its version."""
from theano_mgpu.utils import blas

import numpy as np
import pytest
import theano
import theano.tensor as T


@pytest.mark.needs_compiler
def test_threads_are_set_in_the_library_that_theano_links():
    x = T.matrix('x')
    theano.function([x], T.dot(x, x))(np.ones((3, 3), theano.config.floatX))
    if not any('openblas' in name for name in blas.loaded()):
        pytest.skip('the BLAS here is not OpenBLAS')
    try:
        for number in '21':
            blas.use_threads(int(number))
            threads = [text for name, text in blas.loaded().items() if name.startswith('threads of')]
            assert threads == [number] * len(threads)
    finally:
        blas.use_threads(2)
