// Handles, descriptors and the memory that they describe.
#include "library.h"
#include "../cublas/half.h"

extern "C" CUresult cuDriverGetVersion(int *version);

size_t cudnnGetVersion() { return CUDNN_VERSION; }

size_t cudnnGetCudartVersion() {
  int version = 0;
  cuDriverGetVersion(&version);
  return version;
}

const char *cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case CUDNN_STATUS_BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
  }
  return "unknown status";
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  if (!standin_current_context() || is_broken("create")) return CUDNN_STATUS_NOT_INITIALIZED;
  *handle = new cudnnContext{standin_current_context(), nullptr};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

bool is_current(cudnnHandle_t handle, const char *what) {
  if (handle && handle->context == standin_current_context()) return true;
  standin::say("%s: the context of the handle is not current", what);
  return false;
}

long Shape::offset(long index) const {
  long result = 0;
  for (int i = rank - 1; i >= 0; i--) {
    result += index % dims[i] * strides[i];
    index /= dims[i];
  }
  return result;
}

static size_t size_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_HALF ? 2 : 4;
}

size_t Shape::bytes() const {
  if (!size()) return 0;
  long last = 0;
  for (int i = 0; i < rank; i++) last += (long)(dims[i] - 1) * strides[i];
  return (last + 1) * size_of(type);
}

std::vector<double> load(const Shape &shape, const void *data) {
  std::vector<double> values(shape.size());
  for (long i = 0; i < (long)values.size(); i++) {
    const long at = shape.offset(i);
    values[i] = shape.type == CUDNN_DATA_DOUBLE ? ((const double *)data)[at]
                : shape.type == CUDNN_DATA_HALF ? half_to_float(((const uint16_t *)data)[at])
                                                : ((const float *)data)[at];
  }
  return values;
}

void store(const Shape &shape, void *data, const std::vector<double> &values, double alpha, double beta) {
  const std::vector<double> old = beta ? load(shape, data) : std::vector<double>();  // 0 ignores a NaN
  for (long i = 0; i < (long)values.size(); i++) {
    const long at = shape.offset(i);
    const double value = alpha * values[i] + (beta ? beta * old[i] : 0);
    if (shape.type == CUDNN_DATA_DOUBLE) ((double *)data)[at] = value;
    else if (shape.type == CUDNN_DATA_HALF) ((uint16_t *)data)[at] = float_to_half((float)value);
    else ((float *)data)[at] = (float)value;
  }
}

bool check(const char *what, std::initializer_list<Extent> extents) {
  for (const Extent &extent : extents) {
    if (!extent.bytes || standin_reachable(extent.address, extent.bytes)) continue;
    standin::say("%s: %p (%zu bytes) is not on the stream's device", what, extent.address, extent.bytes);
    return false;
  }
  return true;
}

#define DESCRIPTOR(NAME)                                                         \
  cudnnStatus_t cudnnCreate##NAME##Descriptor(cudnn##NAME##Descriptor_t *desc) { \
    *desc = new cudnn##NAME##Struct;                                             \
    return CUDNN_STATUS_SUCCESS;                                                 \
  }                                                                              \
  cudnnStatus_t cudnnDestroy##NAME##Descriptor(cudnn##NAME##Descriptor_t desc) { \
    delete desc;                                                                 \
    return CUDNN_STATUS_SUCCESS;                                                 \
  }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Pooling)
DESCRIPTOR(ReduceTensor)
cudnnStatus_t cudnnDestroyDropoutDescriptor(cudnnDropoutDescriptor_t) { return CUDNN_STATUS_NOT_SUPPORTED; }
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t) { return CUDNN_STATUS_NOT_SUPPORTED; }

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t desc, cudnnDataType_t type, int rank,
                                         const int dims[], const int strides[]) {
  if (rank < 3 || rank > CUDNN_DIM_MAX) return CUDNN_STATUS_NOT_SUPPORTED;
  for (int i = 0; i < rank; i++)
    if (dims[i] <= 0) return CUDNN_STATUS_BAD_PARAM;
  desc->type = type;
  desc->rank = rank;
  std::copy(dims, dims + rank, desc->dims);
  std::copy(strides, strides + rank, desc->strides);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t desc, int requested, cudnnDataType_t *type,
                                         int *rank, int dims[], int strides[]) {
  const int length = std::min(requested, desc->rank);
  *type = desc->type;
  *rank = desc->rank;
  std::copy(desc->dims, desc->dims + length, dims);
  std::copy(desc->strides, desc->strides + length, strides);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t desc, cudnnDataType_t type, cudnnTensorFormat_t format,
                                         int rank, const int dims[]) {
  if (rank < 3 || rank > CUDNN_DIM_MAX || format != CUDNN_TENSOR_NCHW) return CUDNN_STATUS_NOT_SUPPORTED;
  desc->type = type;
  desc->rank = rank;
  for (int i = rank - 1, stride = 1; i >= 0; stride *= dims[i--]) {
    if (dims[i] <= 0) return CUDNN_STATUS_BAD_PARAM;
    desc->dims[i] = dims[i];
    desc->strides[i] = stride;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t desc, int requested, cudnnDataType_t *type,
                                         cudnnTensorFormat_t *format, int *rank, int dims[]) {
  *type = desc->type;
  *format = CUDNN_TENSOR_NCHW;
  *rank = desc->rank;
  std::copy(desc->dims, desc->dims + std::min(requested, desc->rank), dims);
  return CUDNN_STATUS_SUCCESS;
}

#if CUDNN_MAJOR == 8
cudnnStatus_t cudnnSetRNNDescriptor_v6(cudnnHandle_t, cudnnRNNDescriptor_t, const int, const int,
                                       cudnnDropoutDescriptor_t, cudnnRNNInputMode_t, cudnnDirectionMode_t,
                                       cudnnRNNMode_t, cudnnRNNAlgo_t, cudnnDataType_t) {
  return CUDNN_STATUS_NOT_SUPPORTED;
}
cudnnStatus_t cudnnSetRNNMatrixMathType(cudnnRNNDescriptor_t, cudnnMathType_t) { return CUDNN_STATUS_NOT_SUPPORTED; }
#endif
