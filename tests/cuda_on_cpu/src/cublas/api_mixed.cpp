// The API of libcublas that libgpuarray calls for half precision: products of matrices of several types. They are
// computed in float or double, from copies.
#include "gemm.h"
#include "half.h"
#include "library.h"

#include <vector>

// Types of elements, as cudaDataType numbers them.
enum { TYPE_FLOAT = 0, TYPE_DOUBLE = 1, TYPE_HALF = 2 };

static bool known_type(int type) { return type >= TYPE_FLOAT && type <= TYPE_HALF; }
static size_t size_of(int type) { return type == TYPE_HALF ? 2 : type == TYPE_FLOAT ? 4 : 8; }

// A matrix, or several at a fixed distance (in elements) from each other.
struct Matrices {
  char *address;
  int type;
  int leading;
  long long stride;
  char *at(int index) const { return address + index * stride * (long long)size_of(type); }
};

static Matrices matrices(const void *address, int type, int leading, long long stride = 0) {
  return {(char *)address, type, leading, stride};
}

template<class T> static std::vector<T> load(const void *matrix, int type, long rows, long columns, long leading) {
  std::vector<T> result;
  result.reserve(rows * columns);
  for (long j = 0; j < columns; j++)
    for (long i = 0; i < rows; i++) {
      const long at = j * leading + i;
      result.push_back(type == TYPE_HALF    ? (T)half_to_float(((const uint16_t *)matrix)[at])
                       : type == TYPE_FLOAT ? (T)((const float *)matrix)[at]
                                            : (T)((const double *)matrix)[at]);
    }
  return result;
}

template<class T>
static void store(const std::vector<T> &values, void *matrix, int type, long rows, long columns, long leading) {
  for (long j = 0; j < columns; j++)
    for (long i = 0; i < rows; i++) {
      const T value = values[j * rows + i];
      const long at = j * leading + i;
      if (type == TYPE_HALF) ((uint16_t *)matrix)[at] = float_to_half((float)value);
      else if (type == TYPE_FLOAT) ((float *)matrix)[at] = (float)value;
      else ((double *)matrix)[at] = (double)value;
    }
}

// T is the type of the computation.
template<class T>
static int mixed_gemm(const char *what, Handle handle, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                      const Matrices &a, const Matrices &b, T beta, const Matrices &c, int count) {
  const Shape s{transpose_a, transpose_b, m, n, k, a.leading, b.leading, c.leading};
  if (!s.valid() || count < 0) return INVALID_VALUE;
  if (s.empty() || !count) return CUBLAS_SUCCESS;
  return enqueue(handle, what, [=] {
    for (int i = 0; i < count; i++) {
      if (!check(what, {matrix_extent(a.at(i), s.a_rows(), s.a_columns(), s.lda, size_of(a.type)),
                        matrix_extent(b.at(i), s.b_rows(), s.b_columns(), s.ldb, size_of(b.type)),
                        matrix_extent(c.at(i), s.m, s.n, s.ldc, size_of(c.type))}))
        return ILLEGAL_ADDRESS;
      const std::vector<T> left = load<T>(a.at(i), a.type, s.a_rows(), s.a_columns(), s.lda);
      const std::vector<T> right = load<T>(b.at(i), b.type, s.b_rows(), s.b_columns(), s.ldb);
      std::vector<T> result((size_t)s.m * s.n, T(0));
      if (beta != T(0)) result = load<T>(c.at(i), c.type, s.m, s.n, s.ldc);
      gemm<T>(s.transpose_a, s.transpose_b, s.m, s.n, s.k, alpha, left.data(), std::max(1, s.a_rows()), right.data(),
              std::max(1, s.b_rows()), beta, result.data(), s.m);
      store(result, c.at(i), c.type, s.m, s.n, s.ldc);
    }
    return 0;
  });
}

API int cublasSgemmEx(Handle h, int transa, int transb, int m, int n, int k, const float *alpha, const void *a,
                      int type_a, int lda, const void *b, int type_b, int ldb, const float *beta, void *c, int type_c,
                      int ldc) {
  if (!h) return NOT_INITIALIZED;
  if (!known_type(type_a) || !known_type(type_b) || !known_type(type_c)) return NOT_SUPPORTED;
  if (h->pointer_mode == POINTER_MODE_DEVICE) return NOT_SUPPORTED;
  return mixed_gemm<float>("cublasSgemmEx", h, transa, transb, m, n, k, *alpha, matrices(a, type_a, lda),
                           matrices(b, type_b, ldb), *beta, matrices(c, type_c, ldc), 1);
}

API int cublasGemmEx(Handle h, int transa, int transb, int m, int n, int k, const void *alpha, const void *a,
                     int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c,
                     int ldc, int compute, int) {
  if (!h) return NOT_INITIALIZED;
  for (int type : {type_a, type_b, type_c, compute})
    if (!known_type(type)) return NOT_SUPPORTED;
  if (h->pointer_mode == POINTER_MODE_DEVICE) return NOT_SUPPORTED;
  const Matrices left = matrices(a, type_a, lda), right = matrices(b, type_b, ldb), result = matrices(c, type_c, ldc);
  if (compute == TYPE_DOUBLE)
    return mixed_gemm<double>("cublasGemmEx", h, transa, transb, m, n, k, *(const double *)alpha, left, right,
                              *(const double *)beta, result, 1);
  auto scalar = [=](const void *p) { return compute == TYPE_HALF ? half_to_float(*(uint16_t *)p) : *(const float *)p; };
  return mixed_gemm<float>("cublasGemmEx", h, transa, transb, m, n, k, scalar(alpha), left, right, scalar(beta), result,
                           1);
}

API int cublasHgemmStridedBatched(Handle h, int transa, int transb, int m, int n, int k, const uint16_t *alpha,
                                  const uint16_t *a, int lda, long long stride_a, const uint16_t *b, int ldb,
                                  long long stride_b, const uint16_t *beta, uint16_t *c, int ldc, long long stride_c,
                                  int count) {
  if (!h) return NOT_INITIALIZED;
  if (h->pointer_mode == POINTER_MODE_DEVICE) return NOT_SUPPORTED;
  return mixed_gemm<float>("cublasHgemmStridedBatched", h, transa, transb, m, n, k, half_to_float(*alpha),
                           matrices(a, TYPE_HALF, lda, stride_a), matrices(b, TYPE_HALF, ldb, stride_b),
                           half_to_float(*beta), matrices(c, TYPE_HALF, ldc, stride_c), count);
}
