// The matrix product.
#pragma once

// C = alpha A B + beta C, for A of m x k and B of k x n. Matrices are column-major; `transpose_a` says that A is stored
// as k x m. Written for float and double.
template<class T>
void gemm(bool transpose_a, bool transpose_b, long m, long n, long k, T alpha, const T *a, long lda, const T *b,
          long ldb, T beta, T *c, long ldc);
