/* The names of NVIDIA's cuda.h that gpuarray/ext_cuda.h uses, for machines without CUDA's headers. */
#ifndef THEANO_MGPU_CUDA_H
#define THEANO_MGPU_CUDA_H
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUipcMemHandle_st { char reserved[64]; } CUipcMemHandle;
#endif
