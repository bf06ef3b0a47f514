// What the parts of libcudnn share: descriptors, access to elements, and how work gets onto the stream of a handle.
#pragma once
#include "common.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#pragma GCC visibility push(default)
#include "cudnn.h"
#pragma GCC visibility pop

struct cudnnContext {
  void *context;  // of CUDA: the one that was current when the handle was made
  CUstream stream;
};

// The shape of an array: of a tensor with strides, or of filters, whose elements are contiguous. In elements.
struct Shape {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  int rank = 0;
  int dims[CUDNN_DIM_MAX] = {}, strides[CUDNN_DIM_MAX] = {};

  long size() const {
    long product = 1;
    for (int i = 0; i < rank; i++) product *= dims[i];
    return product;
  }
  long offset(long index) const;  // of an element, whose number is in the order of the dimensions
  size_t bytes() const;           // from the first element to the last one
};
struct cudnnTensorStruct : Shape {};
struct cudnnFilterStruct : Shape {};

struct cudnnConvolutionStruct {
  int length = 0, groups = 1;
  int pad[3] = {}, stride[3] = {}, dilation[3] = {};
  cudnnConvolutionMode_t mode = CUDNN_CONVOLUTION;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};
struct cudnnPoolingStruct {
  cudnnPoolingMode_t mode = CUDNN_POOLING_MAX;
  int length = 0;
  int window[3] = {}, pad[3] = {}, stride[3] = {};
};
struct cudnnReduceTensorStruct {
  cudnnReduceTensorOp_t op = CUDNN_REDUCE_TENSOR_ADD;
  bool indices = false;
};

// The elements of an array on a device, in the order of its dimensions. Call these on the worker.
std::vector<double> load(const Shape &shape, const void *data);
void store(const Shape &shape, void *data, const std::vector<double> &values, double alpha, double beta);

// alpha or beta: a double for arrays of doubles, else a float.
inline double scalar(const Shape &shape, const void *value) {
  return shape.type == CUDNN_DATA_DOUBLE ? *(const double *)value : *(const float *)value;
}

struct Extent {
  const void *address;
  size_t bytes;
};
inline Extent extent(const Shape &shape, const void *data) { return {data, shape.bytes()}; }
// Whether all extents are memory of the stream's device. Call it on the worker.
bool check(const char *what, std::initializer_list<Extent> extents);
const int ILLEGAL_ADDRESS = 700;  // of the driver

// Whether the device's context is current, as each call that computes needs it.
bool is_current(cudnnHandle_t handle, const char *what);

// Runs a function object on the handle's stream. It gives an error code of the driver.
template<class Function> cudnnStatus_t enqueue(cudnnHandle_t handle, const char *what, const Function &function) {
  if (!is_current(handle, what)) return CUDNN_STATUS_EXECUTION_FAILED;
  auto run = [](void *data) { return (*(Function *)data)(); };
  auto release = [](void *data) { delete (Function *)data; };
  return standin_enqueue(handle->stream, run, new Function(function), release, what) ? CUDNN_STATUS_EXECUTION_FAILED
                                                                                      : CUDNN_STATUS_SUCCESS;
}

// CUDA_ON_CPU_CUDNN_BROKEN is `create`, `convolution` or `values`: what of this cuDNN is broken.
inline bool is_broken(const char *what) {
  const char *broken = getenv("CUDA_ON_CPU_CUDNN_BROKEN");
  return broken && !strcmp(broken, what);
}
