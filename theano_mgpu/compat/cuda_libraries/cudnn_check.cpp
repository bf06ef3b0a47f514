// What Theano's ops need of cuDNN: compiled and linked, it shows that headers and library fit; called, that a device
// computes. The text of cudnn_shim.h stands before it.

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Functions that the ops of pooling, softmax, batch normalisation and reductions call; those of convolutions are below.
EXPORTED void *const theano_mgpu_needed[] = {
    (void *)cudnnPoolingForward, (void *)cudnnPoolingBackward, (void *)cudnnSetPoolingNdDescriptor,
    (void *)cudnnSoftmaxForward, (void *)cudnnSoftmaxBackward, (void *)cudnnBatchNormalizationForwardTraining,
    (void *)cudnnBatchNormalizationForwardInference, (void *)cudnnBatchNormalizationBackward,
    (void *)cudnnReduceTensor, (void *)cudnnSetReduceTensorDescriptor, (void *)cudnnGetReductionWorkspaceSize,
    (void *)cudnnGetReductionIndicesSize, (void *)cudnnSetConvolutionGroupCount,
    (void *)cudnnGetConvolutionNdForwardOutputDim, (void *)cudnnGetConvolutionNdDescriptor,
    (void *)cudnnGetTensorNdDescriptor, (void *)cudnnGetFilterNdDescriptor, (void *)cudnnGetVersion};

namespace {

// Each step is skipped after one that failed.
struct Steps {
  cudnnStatus_t status;
  const char *name;
  bool failed;
  void operator()(const char *step, cudnnStatus_t result) {
    if (!failed && result != CUDNN_STATUS_SUCCESS) failed = true, status = result, name = step;
  }
};

}  // namespace

#define STEP(call) if (!step.failed) step(#call, call)

// A convolution of x (1, 2, 6, 6) with w (3, 2, 3, 3) and its two gradients, into y and dy (1, 3, 4, 4), dx and dw.
// Returns NULL, or cuDNN's words for the error; `where` is then the call.
EXPORTED const char *theano_mgpu_convolve(void *handle_, const float *x, const float *w, float *y, const float *dy,
                                          float *dx, float *dw, void *workspace, size_t bytes, const char **where) {
  cudnnHandle_t handle = (cudnnHandle_t)handle_;
  const int padding[2] = {0, 0}, strides[2] = {1, 1}, dilation[2] = {1, 1};
  const int x_dims[4] = {1, 2, 6, 6}, w_dims[4] = {3, 2, 3, 3}, y_dims[4] = {1, 3, 4, 4};
  const int x_strides[4] = {72, 36, 6, 1}, y_strides[4] = {48, 16, 4, 1};
  const float one = 1, zero = 0;
  cudnnTensorDescriptor_t images = NULL, maps = NULL;
  cudnnFilterDescriptor_t filters = NULL;
  cudnnConvolutionDescriptor_t convolution = NULL;
  cudnnConvolutionFwdAlgo_t guessed = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, forward = guessed;
  cudnnConvolutionBwdDataAlgo_t guessed_data, data = CUDNN_CONVOLUTION_BWD_DATA_ALGO_1;
  cudnnConvolutionBwdFilterAlgo_t guessed_filter, filter = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1;
  size_t size = 0;
  Steps step = {CUDNN_STATUS_SUCCESS, "", false};
  STEP(cudnnCreateTensorDescriptor(&images));
  STEP(cudnnCreateTensorDescriptor(&maps));
  STEP(cudnnCreateFilterDescriptor(&filters));
  STEP(cudnnCreateConvolutionDescriptor(&convolution));
  STEP(cudnnSetTensorNdDescriptor(images, CUDNN_DATA_FLOAT, 4, x_dims, x_strides));
  STEP(cudnnSetTensorNdDescriptor(maps, CUDNN_DATA_FLOAT, 4, y_dims, y_strides));
  STEP(cudnnSetFilterNdDescriptor(filters, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, w_dims));
  STEP(cudnnSetConvolutionNdDescriptor(convolution, 2, padding, strides, dilation, CUDNN_CROSS_CORRELATION,
                                       CUDNN_DATA_FLOAT));
  STEP(cudnnSetConvolutionMathType(convolution, CUDNN_DEFAULT_MATH));
  STEP(cudnnGetConvolutionForwardAlgorithm(handle, images, filters, convolution, maps,
                                           CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, bytes, &guessed));
  STEP(cudnnGetConvolutionForwardWorkspaceSize(handle, images, filters, convolution, maps, forward, &size));
  if (size > bytes) forward = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM;
  STEP(cudnnConvolutionForward(handle, &one, images, x, filters, w, convolution, forward, workspace, bytes, &zero, maps,
                               y));
  STEP(cudnnGetConvolutionBackwardDataAlgorithm(handle, filters, maps, convolution, images,
                                                CUDNN_CONVOLUTION_BWD_DATA_SPECIFY_WORKSPACE_LIMIT, bytes,
                                                &guessed_data));
  STEP(cudnnGetConvolutionBackwardDataWorkspaceSize(handle, filters, maps, convolution, images, data, &size));
  if (size > bytes) data = CUDNN_CONVOLUTION_BWD_DATA_ALGO_0;
  STEP(cudnnConvolutionBackwardData(handle, &one, filters, w, maps, dy, convolution, data, workspace, bytes, &zero,
                                    images, dx));
  STEP(cudnnGetConvolutionBackwardFilterAlgorithm(handle, images, maps, convolution, filters,
                                                  CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT, bytes,
                                                  &guessed_filter));
  STEP(cudnnGetConvolutionBackwardFilterWorkspaceSize(handle, images, maps, convolution, filters, filter, &size));
  if (size > bytes) filter = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0;
  STEP(cudnnConvolutionBackwardFilter(handle, &one, images, x, maps, dy, convolution, filter, workspace, bytes, &zero,
                                      filters, dw));
  if (convolution) cudnnDestroyConvolutionDescriptor(convolution);
  if (filters) cudnnDestroyFilterDescriptor(filters);
  if (maps) cudnnDestroyTensorDescriptor(maps);
  if (images) cudnnDestroyTensorDescriptor(images);
  *where = step.name;
  return step.failed ? cudnnGetErrorString(step.status) : NULL;
}

// For cuDNN 7, whose functions to time take no part above.
EXPORTED void *const theano_mgpu_timing[] = {(void *)&cudnnFindConvolutionForwardAlgorithmEx,
                                             (void *)&cudnnFindConvolutionBackwardDataAlgorithmEx,
                                             (void *)&cudnnFindConvolutionBackwardFilterAlgorithmEx};
