"""The factors of the products that gradients are."""
from theano_mgpu.graph.matrix_products import factors_of

import numpy as np
import pytest
import theano
import theano.tensor as T

x, d = T.fmatrices('xd')
RATE = np.float32(.5)


@pytest.mark.parametrize('product', [T.dot(x.T, d), RATE * T.dot(x.T, d), -T.dot(x.T, d) / RATE])
def test_the_product_of_the_factors_is_the_variable(product):
    values = {x: np.ones((3, 5), 'float32'), d: np.arange(6, dtype='float32').reshape(3, 2)}
    left, right = factors_of(product)
    np.testing.assert_array_equal(T.dot(left.T, right).eval(values), product.eval(values))


@pytest.mark.parametrize('other', [
    x, x.sum(), T.dot(x, d), T.dot(x.T, d) + 1, T.dot(x.T, d) * d, RATE / T.dot(x.T, d), T.dot(x.T, d[:, 0]),
    T.dot(T.imatrix().T, T.imatrix()), theano.shared(np.ones((2, 2), 'float32')) * RATE])
def test_other_variables_have_no_factors(other):
    assert factors_of(other) is None
