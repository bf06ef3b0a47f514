"""The host's all_reduce."""
from theano_mgpu.collectives import BLOCK, HostBuffers, all_reduce

import numpy as np
import pytest


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('shape', [(), (1,), (3, 4), (2, BLOCK - 1), (5, 1, 7)])
@pytest.mark.parametrize('n', [1, 2, 5])
def test_weighted_mean(dtype, shape, n):
    rng = np.random.RandomState(0)
    buffers = [np.asarray(rng.randn(*shape), dtype) for _ in range(n)]
    weights = list(rng.dirichlet(np.ones(n)))
    expected = sum(buffer.astype('float64') * weight for buffer, weight in zip(buffers, weights))
    tolerance = {'float16': 1e-2, 'float32': 1e-5, 'float64': 1e-12}[dtype]
    out = np.empty(shape, dtype)
    result = all_reduce(buffers, weights, out)
    assert result.dtype == dtype and result.shape == shape
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
    if n > 1:
        assert result is out
        again = all_reduce(buffers, weights, out, accumulate=True)
        np.testing.assert_allclose(again, 2 * expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('orders', ['CC', 'FF', 'CF', 'FC'])
def test_memory_orders(orders):
    """Gradients of products come in Fortran order."""
    rng = np.random.RandomState(0)
    buffers = [np.asarray(rng.randn(6, 5), order=order) for order in orders]
    expected = 0.25 * buffers[0] + 0.75 * buffers[1]
    np.testing.assert_allclose(all_reduce(buffers, [0.25, 0.75]), expected)
    np.testing.assert_allclose(all_reduce(buffers, [0.25, 0.75], np.empty((6, 5))), expected)
    parts = [buffer[::2, ::2] for buffer in buffers]
    np.testing.assert_allclose(all_reduce(parts, [0.25, 0.75]), expected[::2, ::2])


def test_one_buffer_is_not_copied():
    buffer = np.arange(3.0)
    assert all_reduce([buffer], [1.0]) is buffer
    out = np.empty(3)
    assert all_reduce([buffer], [1.0], out) is out and (out == buffer).all()


def test_half_precision_is_summed_in_single():
    """2048 + 1 is 2048 in float16: eight ones added one by one to it would be lost."""
    buffers = [np.array([2048.0], 'float16')] + [np.array([1.0], 'float16')] * 8
    assert all_reduce(buffers, [1.0] * 9)[0] == 2056


def test_buffers_are_reused_until_a_shape_changes():
    buffers = HostBuffers()
    first = buffers.get('a', np.zeros((2, 3), 'float32'))
    assert buffers.get('a', np.ones((2, 3), 'float32')) is first
    assert buffers.get('b', np.ones((2, 3), 'float32')) is not first
    assert buffers.get('a', np.ones((4, 3), 'float32')).shape == (4, 3)
    assert buffers.get('f', np.asfortranarray(np.ones((4, 3)))).flags.f_contiguous
