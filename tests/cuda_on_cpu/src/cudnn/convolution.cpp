// Convolutions in two and three dimensions, their gradients, and the choice of algorithms. All algorithms compute the
// same; they differ in the workspace that they need, and in what is said of them.
#include "library.h"

// Dimensions of a convolution; two-dimensional ones have a depth of 1.
struct Problem {
  int images, groups, channels, maps;  // channels and maps: of a group
  int in[3], filter[3], out[3], pad[3], stride[3], dilation[3];
  bool flipped;

  Problem(const Shape &x, const Shape &w, const cudnnConvolutionStruct &conv, const Shape &y)
      : images(x.dims[0]), groups(conv.groups), channels(w.dims[1]), maps(w.dims[0] / conv.groups),
        flipped(conv.mode == CUDNN_CONVOLUTION) {
    const int first = 3 - conv.length;
    for (int i = 0; i < 3; i++) {
      const int from = i - first;
      in[i] = from < 0 ? 1 : x.dims[2 + from];
      filter[i] = from < 0 ? 1 : w.dims[2 + from];
      out[i] = from < 0 ? 1 : y.dims[2 + from];
      pad[i] = from < 0 ? 0 : conv.pad[from];
      stride[i] = from < 0 ? 1 : conv.stride[from];
      dilation[i] = from < 0 ? 1 : conv.dilation[from];
    }
  }

  // Calls product(element of x, of w, of y) for each product that is added up.
  template<class Function> void each(const Function &product) const {
    const long in_size = (long)in[0] * in[1] * in[2], filter_size = (long)filter[0] * filter[1] * filter[2];
    long y = 0;
    for (int image = 0; image < images; image++)
      for (int map = 0; map < groups * maps; map++)
        for (int o0 = 0; o0 < out[0]; o0++)
          for (int o1 = 0; o1 < out[1]; o1++)
            for (int o2 = 0; o2 < out[2]; o2++, y++)
              for (int channel = 0; channel < channels; channel++) {
                const long x_first = ((long)image * groups * channels + map / maps * channels + channel) * in_size;
                const long w_first = ((long)map * channels + channel) * filter_size;
                for (int f0 = 0; f0 < filter[0]; f0++)
                  for (int f1 = 0; f1 < filter[1]; f1++)
                    for (int f2 = 0; f2 < filter[2]; f2++) {
                      const int i0 = o0 * stride[0] - pad[0] + f0 * dilation[0];
                      const int i1 = o1 * stride[1] - pad[1] + f1 * dilation[1];
                      const int i2 = o2 * stride[2] - pad[2] + f2 * dilation[2];
                      if (i0 < 0 || i1 < 0 || i2 < 0 || i0 >= in[0] || i1 >= in[1] || i2 >= in[2]) continue;
                      const long f = ((long)f0 * filter[1] + f1) * filter[2] + f2;
                      product(x_first + ((long)i0 * in[1] + i1) * in[2] + i2,
                              w_first + (flipped ? filter_size - 1 - f : f), y);
                    }
              }
  }
};

static bool fits(const Shape &x, const Shape &w, const cudnnConvolutionStruct &conv, const Shape &y) {
  if (x.rank != conv.length + 2 || w.rank != x.rank || y.rank != x.rank || x.dims[0] != y.dims[0]) return false;
  if (x.dims[1] != w.dims[1] * conv.groups || y.dims[1] != w.dims[0] || w.dims[0] % conv.groups) return false;
  for (int i = 0; i < conv.length; i++) {
    const int extent = conv.dilation[i] * (w.dims[2 + i] - 1) + 1;
    if (y.dims[2 + i] != (x.dims[2 + i] + 2 * conv.pad[i] - extent) / conv.stride[i] + 1) return false;
  }
  return true;
}

cudnnStatus_t cudnnSetConvolutionNdDescriptor(cudnnConvolutionDescriptor_t desc, int length, const int pad[],
                                              const int stride[], const int dilation[], cudnnConvolutionMode_t mode,
                                              cudnnDataType_t type) {
  if (length < 2 || length > 3) return CUDNN_STATUS_NOT_SUPPORTED;
  desc->length = length;
  desc->mode = mode;
  desc->type = type;
  std::copy(pad, pad + length, desc->pad);
  std::copy(stride, stride + length, desc->stride);
  std::copy(dilation, dilation + length, desc->dilation);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetConvolutionNdDescriptor(const cudnnConvolutionDescriptor_t desc, int requested, int *length,
                                              int pad[], int stride[], int dilation[], cudnnConvolutionMode_t *mode,
                                              cudnnDataType_t *type) {
  const int count = std::min(requested, desc->length);
  *length = desc->length;
  *mode = desc->mode;
  *type = desc->type;
  std::copy(desc->pad, desc->pad + count, pad);
  std::copy(desc->stride, desc->stride + count, stride);
  std::copy(desc->dilation, desc->dilation + count, dilation);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t desc, cudnnMathType_t type) {
  desc->math = type;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionMathType(cudnnConvolutionDescriptor_t desc, cudnnMathType_t *type) {
  *type = desc->math;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t desc, int count) {
  desc->groups = count;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionGroupCount(cudnnConvolutionDescriptor_t desc, int *count) {
  *count = desc->groups;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetConvolutionNdForwardOutputDim(const cudnnConvolutionDescriptor_t desc,
                                                    const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
                                                    int rank, int dims[]) {
  if (rank != desc->length + 2) return CUDNN_STATUS_BAD_PARAM;
  dims[0] = x->dims[0];
  dims[1] = w->dims[0];
  for (int i = 0; i < desc->length; i++)
    dims[2 + i] = (x->dims[2 + i] + 2 * desc->pad[i] - desc->dilation[i] * (w->dims[2 + i] - 1) - 1) /
                      desc->stride[i] + 1;
  return CUDNN_STATUS_SUCCESS;
}

// The algorithms that this cuDNN has, by their numbers, fastest first.
struct Algorithm {
  int number;
  size_t memory;
  bool deterministic;
  const char *what;
};
const size_t GIBIBYTE = (size_t)1 << 30, KIBIBYTE = 1024;
static const Algorithm FORWARD[] = {
    {CUDNN_CONVOLUTION_FWD_ALGO_FFT, GIBIBYTE, true, "cudnnConvolutionForward, FFT"},
    {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, KIBIBYTE, true,
     "cudnnConvolutionForward, IMPLICIT_PRECOMP_GEMM"},
    {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, 0, true, "cudnnConvolutionForward, IMPLICIT_GEMM"}};
static const Algorithm DATA[] = {
    {CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT, GIBIBYTE, true, "cudnnConvolutionBackwardData, FFT"},
    {CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, 0, false, "cudnnConvolutionBackwardData, ALGO_0"},
    {CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, KIBIBYTE, true, "cudnnConvolutionBackwardData, ALGO_1"}};
static const Algorithm FILTER[] = {
    {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT, GIBIBYTE, true, "cudnnConvolutionBackwardFilter, FFT"},
    {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, 0, false, "cudnnConvolutionBackwardFilter, ALGO_0"},
    {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, KIBIBYTE, true, "cudnnConvolutionBackwardFilter, ALGO_1"}};

template<size_t N> static const Algorithm *known(const Algorithm (&algorithms)[N], int number) {
  for (const Algorithm &each : algorithms)
    if (each.number == number) return &each;
  return nullptr;
}

extern "C" CUresult cuCtxGetDevice(int *device);
extern "C" CUresult cuDeviceGetAttribute(int *value, int attribute, int device);

// Whether float32 is cut to TF32: since cuDNN 8, on compute capability 8.0 and later, unless it is forbidden.
static bool allows_tf32(const Shape &x, const cudnnConvolutionStruct &conv) {
#if CUDNN_MAJOR >= 8
  int device = 0, capability = 0;
  cuCtxGetDevice(&device);
  cuDeviceGetAttribute(&capability, 75, device);
  return x.type == CUDNN_DATA_FLOAT && conv.math != CUDNN_FMA_MATH && capability >= 8;
#else
  (void)x, (void)conv;
  return false;
#endif
}

static void cut(std::vector<double> &values) {
  for (double &value : values) {
    uint32_t bits;
    float small = (float)value;
    memcpy(&bits, &small, sizeof bits);
    bits &= ~(uint32_t)0x1fff;
    memcpy(&small, &bits, sizeof small);
    value = small;
  }
}

// Computes into one of the three arrays, `result`, whose sums run over the products of elements of the other two.
enum Role { X, W, Y };
static cudnnStatus_t convolve(cudnnHandle_t handle, const Algorithm *algorithm, Role result, const void *alpha_,
                              const Shape &x, const void *x_data, const Shape &w, const void *w_data,
                              const cudnnConvolutionStruct &conv, const Shape &y, const void *y_data, void *workspace,
                              size_t bytes, const void *beta_) {
  if (!algorithm || is_broken("convolution")) return CUDNN_STATUS_NOT_SUPPORTED;
  if (!fits(x, w, conv, y) || bytes < algorithm->memory) return CUDNN_STATUS_BAD_PARAM;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_), error = is_broken("values");
  const Problem problem(x, w, conv, y);
  const char *what = algorithm->what;
  const size_t memory = algorithm->memory;
  const bool tf32 = allows_tf32(x, conv);
  return enqueue(handle, what, [=] {
    if (!check(what, {extent(x, x_data), extent(w, w_data), extent(y, y_data), {workspace, memory}}))
      return ILLEGAL_ADDRESS;
    std::vector<double> xs = result == X ? std::vector<double>(x.size()) : load(x, x_data);
    std::vector<double> ws = result == W ? std::vector<double>(w.size()) : load(w, w_data);
    std::vector<double> ys = result == Y ? std::vector<double>(y.size()) : load(y, y_data);
    for (std::vector<double> *values : {&xs, &ws, &ys})
      if (tf32) cut(*values);
    if (result == X) {
      problem.each([&](long i, long j, long k) { xs[i] += ws[j] * ys[k]; });
      xs[0] += error;
      store(x, (void *)x_data, xs, alpha, beta);
    } else if (result == W) {
      problem.each([&](long i, long j, long k) { ws[j] += xs[i] * ys[k]; });
      store(w, (void *)w_data, ws, alpha, beta);
    } else {
      problem.each([&](long i, long j, long k) { ys[k] += xs[i] * ws[j]; });
      store(y, (void *)y_data, ys, alpha, beta);
    }
    return 0;
  });
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void *alpha, const cudnnTensorDescriptor_t x,
                                      const void *x_data, const cudnnFilterDescriptor_t w, const void *w_data,
                                      const cudnnConvolutionDescriptor_t conv, cudnnConvolutionFwdAlgo_t algo,
                                      void *workspace, size_t bytes, const void *beta, const cudnnTensorDescriptor_t y,
                                      void *y_data) {
  return convolve(handle, known(FORWARD, algo), Y, alpha, *x, x_data, *w, w_data, *conv, *y, y_data, workspace, bytes,
                  beta);
}

cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void *alpha, const cudnnFilterDescriptor_t w,
                                           const void *w_data, const cudnnTensorDescriptor_t dy, const void *dy_data,
                                           const cudnnConvolutionDescriptor_t conv, cudnnConvolutionBwdDataAlgo_t algo,
                                           void *workspace, size_t bytes, const void *beta,
                                           const cudnnTensorDescriptor_t dx, void *dx_data) {
  return convolve(handle, known(DATA, algo), X, alpha, *dx, dx_data, *w, w_data, *conv, *dy, dy_data, workspace, bytes,
                  beta);
}

cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void *alpha, const cudnnTensorDescriptor_t x,
                                             const void *x_data, const cudnnTensorDescriptor_t dy, const void *dy_data,
                                             const cudnnConvolutionDescriptor_t conv,
                                             cudnnConvolutionBwdFilterAlgo_t algo, void *workspace, size_t bytes,
                                             const void *beta, const cudnnFilterDescriptor_t dw, void *dw_data) {
  return convolve(handle, known(FILTER, algo), W, alpha, *x, x_data, *dw, dw_data, *conv, *dy, dy_data, workspace,
                  bytes, beta);
}

template<class Result, size_t N>
static cudnnStatus_t list(const Algorithm (&algorithms)[N], cudnnMathType_t math, int requested, size_t limit,
                          int *returned, Result *results) {
  *returned = 0;
  for (const Algorithm &each : algorithms) {
    if (*returned == requested || each.memory > limit) continue;
    Result &result = results[(*returned)++];
    result = Result();
    result.algo = decltype(result.algo)(each.number);
    result.status = CUDNN_STATUS_SUCCESS;
    result.time = *returned;
    result.memory = each.memory;
    result.determinism = each.deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
    result.mathType = math;
  }
  return CUDNN_STATUS_SUCCESS;
}

#define ALGORITHMS(DIRECTION, TABLE, FIRST, SECOND, THIRD, ALGORITHM, PERFORMANCE)                                     \
  cudnnStatus_t cudnnGetConvolution##DIRECTION##WorkspaceSize(                                                         \
      cudnnHandle_t handle, const FIRST, const SECOND, const cudnnConvolutionDescriptor_t, const THIRD,                \
      ALGORITHM algo, size_t *bytes) {                                                                                 \
    const Algorithm *algorithm = known(TABLE, algo);                                                                   \
    if (!is_current(handle, "workspace size")) return CUDNN_STATUS_EXECUTION_FAILED;                                   \
    if (!algorithm) return CUDNN_STATUS_NOT_SUPPORTED;                                                                 \
    *bytes = algorithm->memory;                                                                                        \
    return CUDNN_STATUS_SUCCESS;                                                                                       \
  }                                                                                                                    \
  cudnnStatus_t cudnnGetConvolution##DIRECTION##Algorithm_v7(                                                          \
      cudnnHandle_t, const FIRST, const SECOND, const cudnnConvolutionDescriptor_t conv, const THIRD,                  \
      const int requested, int *returned, PERFORMANCE *results) {                                                      \
    return list(TABLE, conv->math, requested, SIZE_MAX, returned, results);                                            \
  }                                                                                                                    \
  cudnnStatus_t cudnnFindConvolution##DIRECTION##AlgorithmEx(                                                          \
      cudnnHandle_t, const FIRST, const void *, const SECOND, const void *, const cudnnConvolutionDescriptor_t conv,   \
      const THIRD, void *, const int requested, int *returned, PERFORMANCE *results, void *, size_t bytes) {           \
    return list(TABLE, conv->math, requested, bytes, returned, results);                                               \
  }
ALGORITHMS(Forward, FORWARD, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
           cudnnConvolutionFwdAlgo_t, cudnnConvolutionFwdAlgoPerf_t)
ALGORITHMS(BackwardData, DATA, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
           cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdDataAlgoPerf_t)
ALGORITHMS(BackwardFilter, FILTER, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
           cudnnConvolutionBwdFilterAlgo_t, cudnnConvolutionBwdFilterAlgoPerf_t)

#if CUDNN_MAJOR < 8
#define FASTEST(DIRECTION, TABLE, FIRST, SECOND, THIRD, PREFERENCE, ALGORITHM)                                       \
  cudnnStatus_t cudnnGetConvolution##DIRECTION##Algorithm(cudnnHandle_t, const FIRST, const SECOND,                  \
                                                          const cudnnConvolutionDescriptor_t, const THIRD,           \
                                                          PREFERENCE, size_t limit, ALGORITHM *algo) {               \
    for (const Algorithm &each : TABLE)                                                                              \
      if (each.memory <= limit) {                                                                                    \
        *algo = (ALGORITHM)each.number;                                                                              \
        return CUDNN_STATUS_SUCCESS;                                                                                 \
      }                                                                                                              \
    return CUDNN_STATUS_NOT_SUPPORTED;                                                                               \
  }
FASTEST(Forward, FORWARD, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
        cudnnConvolutionFwdPreference_t, cudnnConvolutionFwdAlgo_t)
FASTEST(BackwardData, DATA, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
        cudnnConvolutionBwdDataPreference_t, cudnnConvolutionBwdDataAlgo_t)
FASTEST(BackwardFilter, FILTER, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
        cudnnConvolutionBwdFilterPreference_t, cudnnConvolutionBwdFilterAlgo_t)
#endif
