"""The BLAS of the host: its threads, and a text that tells hosts apart that round otherwise."""
import ctypes

from theano_mgpu.devices import host_blas

import numpy as np
import pytest
import theano
import theano.tensor as T


@pytest.mark.needs_compiler
def test_threads_are_set_in_the_library_that_theano_links():
    x = T.matrix('x')
    theano.function([x], T.dot(x, x))(np.ones((3, 3), theano.config.floatX))
    counts = list(host_blas._functions(('openblas_get_num_threads',)))
    if not counts:
        pytest.skip('the BLAS here is not OpenBLAS')
    try:
        for number in (2, 1):
            host_blas.use_threads(number)
            assert [function() for function in counts] == [number] * len(counts)
    finally:
        host_blas.use_threads(2)
    for function in host_blas._functions(('openblas_get_corename',)):
        function.restype = ctypes.c_char_p
        assert function().decode() in host_blas.description()


def test_a_host_without_maps_has_no_functions(monkeypatch):
    monkeypatch.setattr(host_blas, 'MAPS', '/proc/none')
    host_blas.use_threads(1)
    assert host_blas.description()
