// What the two parts of the API share: the handle, how work gets onto its stream, and checks.
#pragma once
#include "common.h"

#include <algorithm>
#include <cstdlib>

enum {
  CUBLAS_SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15
};
const int ILLEGAL_ADDRESS = 700;  // of the driver

struct cublasContext {
  CUstream stream = nullptr;
  int pointer_mode = 0;   // 0: alpha, beta and results are on the host, 1: on the device
  bool has_tf32 = false;  // the device
  bool tf32 = false;      // products of float are computed with 10 bits of mantissa
};
typedef cublasContext *Handle;
const int POINTER_MODE_DEVICE = 1;

// Runs a function object on the handle's stream. It gives an error code of the driver.
template<class Function> int enqueue(Handle handle, const char *what, const Function &function) {
  if (!standin_current_context()) return EXECUTION_FAILED;
  auto run = [](void *data) { return (*(Function *)data)(); };
  auto release = [](void *data) { delete (Function *)data; };
  int result = standin_enqueue(handle->stream, run, new Function(function), release, what);
  return result ? EXECUTION_FAILED : CUBLAS_SUCCESS;
}

// A column-major matrix, or a vector with a stride, of `rows` x `columns`.
struct Extent {
  const void *address;
  size_t bytes;
};
inline Extent matrix_extent(const void *address, long rows, long columns, long leading, size_t size) {
  return {address, rows && columns ? ((columns - 1) * leading + rows) * size : 0};
}
inline Extent vector_extent(const void *address, long length, long stride, size_t size) {
  return {address, length ? ((length - 1) * labs(stride) + 1) * size : 0};
}

// Whether all extents are memory of the stream's device. Call it on the worker.
inline bool check(const char *what, std::initializer_list<Extent> extents) {
  for (const Extent &extent : extents) {
    if (!extent.bytes || standin_reachable(extent.address, extent.bytes)) continue;
    standin::say("%s: %p (%zu bytes) is not on the stream's device", what, extent.address, extent.bytes);
    return false;
  }
  return true;
}

// alpha or beta: a host's value is read by the call, a device's value when the work runs.
template<class T> class Scalar {
 public:
  Scalar(Handle handle, const T *address)
      : address(address), later(handle->pointer_mode == POINTER_MODE_DEVICE), value(later ? T() : *address) {}
  T get() const { return later ? *address : value; }

 private:
  const T *address;
  bool later;
  T value;
};

// The sizes of a matrix product.
struct Shape {
  int transpose_a, transpose_b, m, n, k, lda, ldb, ldc;
  int a_rows() const { return transpose_a ? k : m; }
  int a_columns() const { return transpose_a ? m : k; }
  int b_rows() const { return transpose_b ? n : k; }
  int b_columns() const { return transpose_b ? k : n; }
  bool valid() const {
    return m >= 0 && n >= 0 && k >= 0 && lda >= std::max(1, a_rows()) && ldb >= std::max(1, b_rows()) &&
           ldc >= std::max(1, m);
  }
  bool empty() const { return !m || !n; }
};
