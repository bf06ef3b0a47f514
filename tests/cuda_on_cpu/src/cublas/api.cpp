// The API of libcublas that libgpuarray calls, for float and double: products of matrices and of vectors.
#include "gemm.h"
#include "library.h"

#include <cstring>
#include <vector>

// The driver's; libcublas is linked with it.
extern "C" CUresult cuStreamSynchronize(CUstream stream);
extern "C" CUresult cuCtxGetDevice(int *device);
extern "C" CUresult cuDeviceGetAttribute(int *value, int attribute, int device);
extern "C" CUresult cuDriverGetVersion(int *version);

// A part of the version, which is that of the driver: 0 is the first number, 1 the second.
API int cublasGetProperty(int part, int *value) {
  if (part < 0 || part > 2) return INVALID_VALUE;
  cuDriverGetVersion(value);
  *value = part == 0 ? *value / 1000 : part == 1 ? *value % 1000 / 10 : 0;
  return CUBLAS_SUCCESS;
}

API int cublasCreate_v2(Handle *handle) {
  if (!standin_current_context()) return NOT_INITIALIZED;
  int device = 0, capability = 0;
  cuCtxGetDevice(&device);
  cuDeviceGetAttribute(&capability, 75, device);
  *handle = new cublasContext;
  (*handle)->has_tf32 = capability >= 8;
  return CUBLAS_SUCCESS;
}

// The modes of cublas_api.h; cuBLAS 11 added the one for TF32.
enum { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_PEDANTIC_MATH = 2, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
API int cublasSetMathMode(Handle handle, int mode) {
  int version;
  cublasGetProperty(0, &version);
  if (!handle) return NOT_INITIALIZED;
  if (mode < CUBLAS_DEFAULT_MATH || mode > (version < 11 ? CUBLAS_TENSOR_OP_MATH : CUBLAS_TF32_TENSOR_OP_MATH))
    return INVALID_VALUE;
  handle->tf32 = mode == CUBLAS_TF32_TENSOR_OP_MATH && handle->has_tf32;
  return CUBLAS_SUCCESS;
}

API int cublasDestroy_v2(Handle handle) {
  if (!handle) return NOT_INITIALIZED;
  delete handle;
  return CUBLAS_SUCCESS;
}

API int cublasSetStream_v2(Handle handle, CUstream stream) {
  if (!handle) return NOT_INITIALIZED;
  handle->stream = stream;
  return CUBLAS_SUCCESS;
}

API int cublasSetPointerMode_v2(Handle handle, int mode) {
  if (!handle) return NOT_INITIALIZED;
  handle->pointer_mode = mode;
  return CUBLAS_SUCCESS;
}

API int cublasGetPointerMode_v2(Handle handle, int *mode) {
  if (!handle) return NOT_INITIALIZED;
  *mode = handle->pointer_mode;
  return CUBLAS_SUCCESS;
}

API int cublasSetAtomicsMode(Handle, int) { return CUBLAS_SUCCESS; }

// A column-major matrix as TF32; its columns stay as far from each other.
static std::vector<float> cut(const float *matrix, long rows, long columns, long leading) {
  std::vector<float> result(rows && columns ? (columns - 1) * leading + rows : 0);
  for (size_t i = 0; i < result.size(); i++) {
    uint32_t bits;
    memcpy(&bits, matrix + i, sizeof bits);
    bits &= ~(uint32_t)0x1fff;
    memcpy(&result[i], &bits, sizeof bits);
  }
  return result;
}

static void gemm_of_tf32(const Shape &s, float alpha, const float *a, const float *b, float beta, float *c) {
  const std::vector<float> left = cut(a, s.a_rows(), s.a_columns(), s.lda), right = cut(b, s.b_rows(), s.b_columns(), s.ldb);
  gemm<float>(s.transpose_a, s.transpose_b, s.m, s.n, s.k, alpha, left.data(), s.lda, right.data(), s.ldb, beta, c, s.ldc);
}
static void gemm_of_tf32(const Shape &, double, const double *, const double *, double, double *) {}

// One product, after a check that its matrices are on the device.
template<class T>
static int multiply(const char *what, bool tf32, const Shape &s, T alpha, const T *a, const T *b, T beta, T *c) {
  if (!check(what, {matrix_extent(a, s.a_rows(), s.a_columns(), s.lda, sizeof(T)),
                    matrix_extent(b, s.b_rows(), s.b_columns(), s.ldb, sizeof(T)),
                    matrix_extent(c, s.m, s.n, s.ldc, sizeof(T))}))
    return ILLEGAL_ADDRESS;
  if (tf32 && sizeof(T) == sizeof(float)) gemm_of_tf32(s, alpha, a, b, beta, c);
  else gemm<T>(s.transpose_a, s.transpose_b, s.m, s.n, s.k, alpha, a, s.lda, b, s.ldb, beta, c, s.ldc);
  return 0;
}

// Products of matrices at a fixed distance from each other.
template<class T>
static int strided_gemm(const char *what, Handle handle, const Shape &shape, const T *alpha, const T *a, long stride_a,
                        const T *b, long stride_b, const T *beta, T *c, long stride_c, int count) {
  if (!handle) return NOT_INITIALIZED;
  if (!shape.valid() || count < 0 || !alpha || !beta) return INVALID_VALUE;
  if (shape.empty() || !count) return CUBLAS_SUCCESS;
  const Scalar<T> alpha_value(handle, alpha), beta_value(handle, beta);
  const bool tf32 = handle->tf32;
  return enqueue(handle, what, [=] {
    for (int i = 0; i < count; i++) {
      int error = multiply(what, tf32, shape, alpha_value.get(), a + i * stride_a, b + i * stride_b, beta_value.get(),
                           c + i * stride_c);
      if (error) return error;
    }
    return 0;
  });
}

// Products of matrices whose addresses are in arrays, which are on the device too.
template<class T>
static int batched_gemm(const char *what, Handle handle, const Shape &shape, const T *alpha, const T **a, const T **b,
                        const T *beta, T **c, int count) {
  if (!handle) return NOT_INITIALIZED;
  if (!shape.valid() || count < 0 || !alpha || !beta) return INVALID_VALUE;
  if (shape.empty() || !count) return CUBLAS_SUCCESS;
  const Scalar<T> alpha_value(handle, alpha), beta_value(handle, beta);
  const bool tf32 = handle->tf32;
  return enqueue(handle, what, [=] {
    const size_t bytes = sizeof(T *) * count;
    if (!check(what, {{a, bytes}, {b, bytes}, {c, bytes}})) return ILLEGAL_ADDRESS;
    for (int i = 0; i < count; i++)
      if (int error = multiply(what, tf32, shape, alpha_value.get(), a[i], b[i], beta_value.get(), c[i])) return error;
    return 0;
  });
}

// The first element in memory order of a vector whose stride may be negative is its last one.
template<class T> static T *first_element(T *vector, long length, long stride) {
  return stride < 0 ? vector - (length - 1) * stride : vector;
}

// y = alpha A x + beta y, for A of m x n, or its transpose.
template<class T>
static int gemv(const char *what, Handle handle, int transpose, int m, int n, const T *alpha, const T *a, int lda,
                const T *x, int stride_x, const T *beta, T *y, int stride_y) {
  if (!handle) return NOT_INITIALIZED;
  if (m < 0 || n < 0 || lda < std::max(1, m) || !stride_x || !stride_y) return INVALID_VALUE;
  if (!m || !n) return CUBLAS_SUCCESS;
  const Scalar<T> alpha_value(handle, alpha), beta_value(handle, beta);
  return enqueue(handle, what, [=] {
    const long length_y = transpose ? n : m, length_x = transpose ? m : n;
    if (!check(what, {matrix_extent(a, m, n, lda, sizeof(T)), vector_extent(x, length_x, stride_x, sizeof(T)),
                      vector_extent(y, length_y, stride_y, sizeof(T))}))
      return ILLEGAL_ADDRESS;
    const T *first_x = first_element(x, length_x, stride_x);
    T *first_y = first_element(y, length_y, stride_y);
    std::vector<T> product(length_y, T(0));
    for (long j = 0; j < n; j++)
      for (long i = 0; i < m; i++)
        product[transpose ? j : i] += a[j * lda + i] * first_x[(transpose ? i : j) * stride_x];
    for (long i = 0; i < length_y; i++) {
      T &out = first_y[i * stride_y];
      const T old = beta_value.get() == T(0) ? T(0) : beta_value.get() * out;  // 0 ignores a NaN in y
      out = alpha_value.get() * product[i] + old;
    }
    return 0;
  });
}

// A += alpha x y', for A of m x n.
template<class T>
static int ger(const char *what, Handle handle, int m, int n, const T *alpha, const T *x, int stride_x, const T *y,
               int stride_y, T *a, int lda) {
  if (!handle) return NOT_INITIALIZED;
  if (m < 0 || n < 0 || lda < std::max(1, m) || !stride_x || !stride_y) return INVALID_VALUE;
  if (!m || !n) return CUBLAS_SUCCESS;
  const Scalar<T> alpha_value(handle, alpha);
  return enqueue(handle, what, [=] {
    if (!check(what, {matrix_extent(a, m, n, lda, sizeof(T)), vector_extent(x, m, stride_x, sizeof(T)),
                      vector_extent(y, n, stride_y, sizeof(T))}))
      return ILLEGAL_ADDRESS;
    const T *first_x = first_element(x, m, stride_x), *first_y = first_element(y, n, stride_y);
    for (long j = 0; j < n; j++) {
      const T factor = alpha_value.get() * first_y[j * (long)stride_y];
      for (long i = 0; i < m; i++) a[j * lda + i] += first_x[i * stride_x] * factor;
    }
    return 0;
  });
}

template<class T>
static int dot(const char *what, Handle handle, int length, const T *x, int stride_x, const T *y, int stride_y,
               T *result) {
  if (!handle) return NOT_INITIALIZED;
  const bool on_device = handle->pointer_mode == POINTER_MODE_DEVICE;
  const int failed = enqueue(handle, what, [=] {
    if (!check(what, {vector_extent(x, length, stride_x, sizeof(T)), vector_extent(y, length, stride_y, sizeof(T)),
                      {result, on_device ? sizeof(T) : 0}}))
      return ILLEGAL_ADDRESS;
    const T *first_x = first_element(x, length, stride_x), *first_y = first_element(y, length, stride_y);
    double sum = 0;
    for (long i = 0; i < length; i++) sum += (double)first_x[i * stride_x] * first_y[i * stride_y];
    *result = (T)sum;
    return 0;
  });
  if (failed || on_device) return failed;
  return cuStreamSynchronize(handle->stream) ? EXECUTION_FAILED : CUBLAS_SUCCESS;
}

#define DEFINE(LETTER, T) \
  API int cublas##LETTER##dot_v2(Handle h, int n, const T *x, int incx, const T *y, int incy, T *result) { \
    return dot<T>("cublas" #LETTER "dot", h, n, x, incx, y, incy, result); \
  } \
  API int cublas##LETTER##gemv_v2(Handle h, int trans, int m, int n, const T *alpha, const T *a, int lda, const T *x, \
                                  int incx, const T *beta, T *y, int incy) { \
    return gemv<T>("cublas" #LETTER "gemv", h, trans, m, n, alpha, a, lda, x, incx, beta, y, incy); \
  } \
  API int cublas##LETTER##ger_v2(Handle h, int m, int n, const T *alpha, const T *x, int incx, const T *y, int incy, \
                                 T *a, int lda) { \
    return ger<T>("cublas" #LETTER "ger", h, m, n, alpha, x, incx, y, incy, a, lda); \
  } \
  API int cublas##LETTER##gemm_v2(Handle h, int transa, int transb, int m, int n, int k, const T *alpha, const T *a, \
                                  int lda, const T *b, int ldb, const T *beta, T *c, int ldc) { \
    const Shape shape{transa, transb, m, n, k, lda, ldb, ldc}; \
    return strided_gemm<T>("cublas" #LETTER "gemm", h, shape, alpha, a, 0, b, 0, beta, c, 0, 1); \
  } \
  API int cublas##LETTER##gemmStridedBatched(Handle h, int transa, int transb, int m, int n, int k, const T *alpha, \
                                             const T *a, int lda, long long stridea, const T *b, int ldb, \
                                             long long strideb, const T *beta, T *c, int ldc, long long stridec, \
                                             int count) { \
    const Shape shape{transa, transb, m, n, k, lda, ldb, ldc}; \
    return strided_gemm<T>("cublas" #LETTER "gemmStridedBatched", h, shape, alpha, a, stridea, b, strideb, beta, c, \
                           stridec, count); \
  } \
  API int cublas##LETTER##gemmBatched(Handle h, int transa, int transb, int m, int n, int k, const T *alpha, \
                                      const T **a, int lda, const T **b, int ldb, const T *beta, T **c, int ldc, \
                                      int count) { \
    const Shape shape{transa, transb, m, n, k, lda, ldb, ldc}; \
    return batched_gemm<T>("cublas" #LETTER "gemmBatched", h, shape, alpha, a, b, beta, c, count); \
  }
DEFINE(S, float)
DEFINE(D, double)
