/* The functions of cuDNN 7 that Theano 1.0.5 calls, for cuDNN 8 and 9, which lack them; one choice of algorithms on all
 * devices; and calls within the context of the device. The text stands before the C code of Theano's ops.
 *
 * Where Theano is told to guess, it passes the free memory of the device. Two devices, or one device at two times, would
 * then compute by different algorithms, with different rounding. Here the memory has a fixed limit, and deterministic
 * algorithms come first.
 *
 * CUDNN_DEFAULT_MATH allows TF32, with 10 bits of mantissa, on compute capability 8.0 and later. CUDNN_FMA_MATH does
 * not.
 */
#ifndef THEANO_MGPU_CUDNN_SHIM_H
#define THEANO_MGPU_CUDNN_SHIM_H
#include <cudnn.h>

#if CUDNN_MAJOR >= 8 && !defined(THEANO_MGPU_TF32)
#define CUDNN_DEFAULT_MATH CUDNN_FMA_MATH
#endif

namespace theano_mgpu {

enum { MOST_RESULTS = 16 };
const size_t WORKSPACE_LIMIT = (size_t)512 << 20;

template <class Result> inline const Result *first_within(const Result *results, int count, size_t limit) {
  for (int any = 0; any < 2; any++)
    for (int i = 0; i < count; i++)
      if (results[i].status == CUDNN_STATUS_SUCCESS && results[i].memory <= limit &&
          (any || results[i].determinism == CUDNN_DETERMINISTIC))
        return &results[i];
  return NULL;
}

// The functions for the three directions of a convolution differ in names and in the types of their descriptors.
#define THEANO_MGPU_CHOOSE(DIRECTION, FIRST, SECOND, THIRD, ALGORITHM, RESULT)                                         \
  inline cudnnStatus_t guess(cudnnHandle_t handle, FIRST first, SECOND second,                                        \
                             cudnnConvolutionDescriptor_t convolution, THIRD third, int, size_t,                      \
                             ALGORITHM *algorithm) {                                                                  \
    RESULT results[MOST_RESULTS];                                                                                     \
    int count = 0;                                                                                                    \
    cudnnStatus_t status = cudnnSetConvolutionMathType(convolution, CUDNN_DEFAULT_MATH);                              \
    if (status == CUDNN_STATUS_SUCCESS)                                                                               \
      status = cudnnGetConvolution##DIRECTION##Algorithm_v7(handle, first, second, convolution, third, MOST_RESULTS,  \
                                                            &count, results);                                         \
    if (status != CUDNN_STATUS_SUCCESS) return status;                                                                \
    const RESULT *chosen = first_within(results, count, WORKSPACE_LIMIT);                                             \
    if (chosen == NULL) return CUDNN_STATUS_NOT_SUPPORTED;                                                            \
    *algorithm = chosen->algo;                                                                                        \
    return CUDNN_STATUS_SUCCESS;                                                                                      \
  }                                                                                                                   \
  inline cudnnStatus_t time(cudnnHandle_t handle, FIRST first, const void *first_data, SECOND second,                 \
                            const void *second_data, cudnnConvolutionDescriptor_t convolution, THIRD third,           \
                            void *third_data, int, int *count, RESULT *result, void *workspace, size_t bytes) {       \
    RESULT results[MOST_RESULTS];                                                                                     \
    int all = 0;                                                                                                      \
    cudnnMathType_t math;                                                                                             \
    cudnnStatus_t status = cudnnGetConvolutionMathType(convolution, &math);                                           \
    if (status == CUDNN_STATUS_SUCCESS && math != CUDNN_TENSOR_OP_MATH)                                               \
      status = cudnnSetConvolutionMathType(convolution, CUDNN_DEFAULT_MATH);                                          \
    if (status == CUDNN_STATUS_SUCCESS)                                                                               \
      status = cudnnFindConvolution##DIRECTION##AlgorithmEx(handle, first, first_data, second, second_data,           \
                                                            convolution, third, third_data, MOST_RESULTS, &all,       \
                                                            results, workspace, bytes);                               \
    if (status != CUDNN_STATUS_SUCCESS) return status;                                                                \
    const RESULT *chosen = first_within(results, all, bytes);                                                         \
    if (chosen == NULL) return CUDNN_STATUS_NOT_SUPPORTED;                                                            \
    *result = *chosen;                                                                                                \
    *count = 1;                                                                                                       \
    return CUDNN_STATUS_SUCCESS;                                                                                      \
  }

namespace forward {
THEANO_MGPU_CHOOSE(Forward, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
                  cudnnConvolutionFwdAlgo_t, cudnnConvolutionFwdAlgoPerf_t)
}
namespace backward_data {
THEANO_MGPU_CHOOSE(BackwardData, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
                  cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdDataAlgoPerf_t)
}
namespace backward_filter {
THEANO_MGPU_CHOOSE(BackwardFilter, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
                  cudnnConvolutionBwdFilterAlgo_t, cudnnConvolutionBwdFilterAlgoPerf_t)
}

#if CUDNN_MAJOR == 8
inline cudnnStatus_t set_rnn(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, int hidden, int layers,
                             cudnnDropoutDescriptor_t dropout, cudnnRNNInputMode_t input,
                             cudnnDirectionMode_t direction, cudnnRNNMode_t cell, cudnnRNNAlgo_t algorithm,
                             cudnnDataType_t type) {
  cudnnStatus_t status = cudnnSetRNNDescriptor_v6(handle, rnn, hidden, layers, dropout, input, direction, cell,
                                                  algorithm, type);
  return status == CUDNN_STATUS_SUCCESS ? cudnnSetRNNMatrixMathType(rnn, CUDNN_DEFAULT_MATH) : status;
}
#define cudnnSetRNNDescriptor theano_mgpu::set_rnn
#endif

}  // namespace theano_mgpu

#define cudnnGetConvolutionForwardAlgorithm theano_mgpu::forward::guess
#define cudnnGetConvolutionBackwardDataAlgorithm theano_mgpu::backward_data::guess
#define cudnnGetConvolutionBackwardFilterAlgorithm theano_mgpu::backward_filter::guess
#define cudnnFindConvolutionForwardAlgorithmEx theano_mgpu::forward::time
#define cudnnFindConvolutionBackwardDataAlgorithmEx theano_mgpu::backward_data::time
#define cudnnFindConvolutionBackwardFilterAlgorithmEx theano_mgpu::backward_filter::time

// Theano's C code calls these without the device's context as the current one; its other calls stand within it. `c` is
// the context there.
#ifdef LIBGPU_EXT_CUDA
namespace theano_mgpu {
inline cudnnStatus_t leave(gpucontext *context, cudnnStatus_t status) {
  cuda_exit(context);
  return status;
}
}  // namespace theano_mgpu
#define THEANO_MGPU_WITHIN(call) (cuda_enter(c->ctx), theano_mgpu::leave(c->ctx, (call)))
#define cudnnBatchNormalizationForwardTraining(...) \
  THEANO_MGPU_WITHIN(cudnnBatchNormalizationForwardTraining(__VA_ARGS__))
#define cudnnBatchNormalizationForwardInference(...) \
  THEANO_MGPU_WITHIN(cudnnBatchNormalizationForwardInference(__VA_ARGS__))
#define cudnnBatchNormalizationBackward(...) THEANO_MGPU_WITHIN(cudnnBatchNormalizationBackward(__VA_ARGS__))
#define cudnnGetReductionWorkspaceSize(...) THEANO_MGPU_WITHIN(cudnnGetReductionWorkspaceSize(__VA_ARGS__))
#define cudnnReduceTensor(...) THEANO_MGPU_WITHIN(cudnnReduceTensor(__VA_ARGS__))
#endif

#if CUDNN_MAJOR >= 8
enum {
  CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT,
  CUDNN_CONVOLUTION_BWD_DATA_SPECIFY_WORKSPACE_LIMIT,
  CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT
};
#endif
#endif
