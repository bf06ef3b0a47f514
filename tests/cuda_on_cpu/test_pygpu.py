"""pygpu and libgpuarray on the stand-in."""
import importlib.util

import numpy as np
import pytest

from cuda_on_cpu.child import on_standin

pytestmark = pytest.mark.skipif(not importlib.util.find_spec('pygpu'), reason='pygpu is not installed')


def contexts():
    import pygpu
    return pygpu.init('cuda0'), pygpu.init('cuda1')


@on_standin(names='First;Second', cc='6.1')
def test_contexts():
    first, second = contexts()
    assert (first.devname, second.devname) == ('First', 'Second')
    assert first.unique_id != second.unique_id
    assert first.bin_id == b'compute_61'


@on_standin()
def test_blas():
    import pygpu
    from pygpu import blas
    context = contexts()[0]
    rng = np.random.RandomState(0)
    for dtype in ('float32', 'float64'):
        a, b = rng.rand(37, 53).astype(dtype), rng.rand(53, 41).astype(dtype)
        column = b[:, 0].copy()
        gpu_a, gpu_b, gpu_row, gpu_column = (pygpu.asarray(x, context=context) for x in (a, b, a[0].copy(), column))
        np.testing.assert_allclose(np.asarray(blas.gemm(1, gpu_a, gpu_b, 0)), a @ b, rtol=1e-4)
        np.testing.assert_allclose(np.asarray(blas.gemv(1, gpu_a, gpu_column, 0)), a @ column, rtol=1e-4)
        np.testing.assert_allclose(np.asarray(blas.dot(gpu_row, gpu_column)), a[0] @ column, rtol=1e-4)


@on_standin()
def test_elementwise_slices_and_transfers():
    import pygpu
    first, second = contexts()
    a = np.random.RandomState(0).rand(37, 53).astype('float32')
    gpu_a = pygpu.array(a, context=first, cls=pygpu._array.ndgpuarray)
    np.testing.assert_allclose(np.asarray(gpu_a + gpu_a * 2), a * 3, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(gpu_a.T[::2]), a.T[::2])
    np.testing.assert_array_equal(np.asarray(gpu_a.transfer(second)), a)


@pytest.mark.slow
@on_standin()
def test_reductions():
    import pygpu
    context = contexts()[0]
    rng = np.random.RandomState(0)
    for dtype in ('float32', 'int32'):
        x = (rng.rand(8, 20, 70) * 10).astype(dtype)
        gpu_x = pygpu.array(x, context=context, cls=pygpu._array.ndgpuarray)
        for axis in (None, 0, 1, 2, (0, 2)):
            np.testing.assert_allclose(np.asarray(gpu_x.sum(axis=axis)), x.sum(axis=axis), rtol=1e-4)


@on_standin(fail_alloc='0:0')
def test_out_of_memory_is_an_exception():
    import pygpu
    context = contexts()[0]
    with pytest.raises(pygpu.gpuarray.GpuArrayException, match='(?i)memory'):
        pygpu.zeros((1024, 1024), context=context)
