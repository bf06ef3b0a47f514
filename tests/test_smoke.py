"""Placeholder: the package imports and computes on a plain `pip install`."""
import theano_mgpu  # before theano

import numpy as np
import theano


def test_imports_and_computes():
    x = theano.tensor.fmatrix()
    f = theano.function([x], theano.tensor.exp(x).sum() + 1)
    assert np.isclose(f(np.zeros((3, 4), 'float32')), 13)
    assert theano_mgpu.__version__
