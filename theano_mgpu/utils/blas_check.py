"""A program: name the kernels of each OpenBLAS that NumPy, SciPy and Theano load, and compare their products with sums.

It runs in a process of its own, which wrong kernels may end. Its arguments: the kernels that each library has to have,
or nothing for any, without a comparison; the files of libraries that Theano loads; each folder of sys.path. It prints
a line with the version and the kernels of each library. If one has other kernels, or a product is wrong, stderr tells
so, and the exit code is 1.
"""
import contextlib
import ctypes
import itertools
import sys

# Rows, columns and length of products: a single number, less than a vector, and more than a block of the kernels.
SHAPES = (1, 1, 1), (3, 7, 5), (17, 33, 65), (129, 67, 35), (131, 300, 517)
TYPES = ('float32', 's', ctypes.c_float), ('float64', 'd', ctypes.c_double)
PADDING = 3  # elements after each row
NAMES = [prefix + 'cblas_%s' + suffix for prefix in ('', 'scipy_') for suffix in ('', '64_', '_64')]
BY_ROW, PLAIN, TRANSPOSED = 101, 111, 112  # as cblas.h numbers them


def main(kernels, libraries, *folders):
    sys.path[:] = folders
    import numpy  # noqa: F401  loads its BLAS
    import threadpoolctl
    with contextlib.suppress(ImportError):
        import scipy.linalg  # noqa: F401  loads another one, perhaps
    for name in libraries.split():
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
    for each in threadpoolctl.threadpool_info():
        if each['internal_api'] == 'openblas':
            print('OpenBLAS', each['version'], each['architecture'])
            if kernels and each['architecture'].lower() != kernels.lower():
                sys.exit('OpenBLAS %s takes %s' % (each['version'], each['architecture']))
            if kernels:
                compare(ctypes.CDLL(each['filepath']))


def compare(library):
    """End the program with a message if a product of a library is wrong."""
    import numpy as np
    pattern = next(each for each in NAMES if hasattr(library, each % 'sgemm'))
    random = np.random.RandomState(0)

    def padded(matrix):
        return np.pad(np.ascontiguousarray(matrix), [(0, 0), (0, PADDING)], 'constant', constant_values=np.nan)

    def call(name, *arguments):
        # An integer of 64 bits stands for one of 32, too: in registers and on the stack of x86.
        getattr(library, pattern % name)(*[
            ctypes.c_int64(each) if isinstance(each, int) else
            ctypes.c_void_p(each.ctypes.data) if isinstance(each, np.ndarray) else each for each in arguments])

    for (dtype, letter, number), (m, n, k) in itertools.product(TYPES, SHAPES):
        a, b, c = (random.uniform(-1, 1, shape).astype(dtype) for shape in [(m, k), (k, n), (m, n)])
        sums = np.einsum('ik,kj->ij', a.astype('float64'), b.astype('float64'))  # a loop of NumPy's own
        for ta, tb, beta in itertools.product((PLAIN, TRANSPOSED), (PLAIN, TRANSPOSED), (0, -2)):
            left, right, out = padded(a if ta == PLAIN else a.T), padded(b if tb == PLAIN else b.T), padded(c)
            expected, column = padded(.5 * sums + beta * c), c[:, 0].copy()
            out[:, n], expected[:, n] = column, expected[:, 0]
            call(letter + 'gemm', BY_ROW, ta, tb, m, n, k, number(.5), left, left.shape[1], right, right.shape[1],
                 number(beta), out, out.shape[1])
            for y, step in ((out[:, n], out.shape[1]), (column, 1)):  # the first column once more, by gemv
                call(letter + 'gemv', BY_ROW, ta, left.shape[0], left.shape[1] - PADDING, number(.5), left,
                     left.shape[1], right, right.shape[1] if tb == PLAIN else 1, number(beta), y, step)
            if not np.allclose(np.column_stack([out, column]), np.column_stack([expected, expected[:, 0]]), rtol=0,
                               atol=4 * (k + 4) * np.finfo(dtype).eps, equal_nan=True):
                sys.exit('a product of %dx%d and %dx%d in %s is wrong' % (m, k, k, n, dtype))


if __name__ == '__main__':
    main(*sys.argv[1:])
