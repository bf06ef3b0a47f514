"""cuBLAS: products of matrices against NumPy."""
import ctypes

import numpy as np

from cuda_on_cpu.child import on_standin
from cuda_on_cpu.driver import ILLEGAL_ADDRESS, LAUNCH_FAILED, Device, call, fails_with

TYPES = {'S': ('float32', ctypes.c_float), 'D': ('float64', ctypes.c_double)}


class Blas:
    """A handle of cuBLAS on a device's stream."""

    def __init__(self, device):
        self.device = device
        self.handle = device.out(ctypes.c_void_p, 'cublasCreate_v2')
        call('cublasSetStream_v2', self.handle, device.stream)

    def gemm(self, letter, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        scalar = TYPES[letter][1]
        self.device.call('cublas%sgemm_v2' % letter, self.handle, transpose_a, transpose_b, m, n, k,
                         ctypes.byref(scalar(alpha)), a, lda, b, ldb, ctypes.byref(scalar(beta)), c, ldc)


@on_standin()
def test_gemm():
    device = Device(0)
    blas, rng = Blas(device), np.random.RandomState(1)
    for letter, (dtype, _) in TYPES.items():
        for m, n, k in ((1, 1, 1), (5, 7, 3), (16, 6, 256), (97, 13, 300), (130, 101, 517)):
            for transpose_a, transpose_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
                # cuBLAS is column-major: the transpose of each NumPy array is its matrix.
                a = rng.uniform(-1, 1, (m, k) if transpose_a else (k, m)).astype(dtype)
                b = rng.uniform(-1, 1, (k, n) if transpose_b else (n, k)).astype(dtype)
                c = rng.uniform(-1, 1, (n, m)).astype(dtype)
                result = device.upload(c)
                blas.gemm(letter, transpose_a, transpose_b, m, n, k, 2, device.upload(a), a.shape[1],
                          device.upload(b), b.shape[1], .5, result, m)
                got = device.read(result, (n, m), dtype)
                left, right = (a if transpose_a else a.T), (b if transpose_b else b.T)
                want = 2 * (left.astype('float64') @ right.astype('float64')).T + c / 2
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 if dtype == 'float32' else 1e-12)


@on_standin()
def test_beta_0_ignores_what_was_there():
    device = Device(0)
    one = device.upload(np.ones(1, 'float32'))
    result = device.allocate(4)  # NaN
    Blas(device).gemm('S', 0, 0, 1, 1, 1, 1, one, 1, one, 1, 0, result, 1)
    assert device.read(result, 1)[0] == 1


def largest_error(mode):
    """Return the largest relative error of a product of float32 in a mode of cublasSetMathMode."""
    device, (a, b) = Device(0), np.random.RandomState(0).rand(2, 8, 8).astype('float32')
    blas, result = Blas(device), device.allocate(256)
    call('cublasSetMathMode', blas.handle, mode)
    blas.gemm('S', 0, 0, 8, 8, 8, 1, device.upload(a), 8, device.upload(b), 8, 0, result, 8)
    return np.abs(device.read(result, (8, 8)) / (b.astype('float64') @ a) - 1).max()


@on_standin(cc='8.0;7.5', version=12000)
def test_a_mode_cuts_to_tf32():
    assert largest_error(0) < 1e-6 and 1e-5 < largest_error(3) < 1e-2
    other = Blas(Device(1))
    call('cublasSetMathMode', other.handle, 3)  # which the device cannot


@on_standin(cc='8.0', version=10020)
def test_an_old_version_has_no_tf32():
    with fails_with(7):
        largest_error(3)


@on_standin()
def test_a_matrix_of_another_device_is_an_error():
    first, second = Device(0), Device(1)
    matrix = first.upload(np.ones((4, 4), 'float32'))
    Blas(first).gemm('S', 0, 0, 4, 4, 4, 1, matrix, 4, matrix, 4, 0, second.allocate(64), 4)
    with fails_with(ILLEGAL_ADDRESS):
        first.synchronize()


@on_standin(fail='0:1')
def test_a_gemm_counts_as_a_launch():
    device = Device(0)
    one = device.upload(np.ones(1, 'float32'))
    blas, result = Blas(device), device.allocate(4)
    blas.gemm('S', 0, 0, 1, 1, 1, 1, one, 1, one, 1, 0, result, 1)
    device.synchronize()
    blas.gemm('S', 0, 0, 1, 1, 1, 1, one, 1, one, 1, 0, result, 1)
    with fails_with(LAUNCH_FAILED):
        device.synchronize()
