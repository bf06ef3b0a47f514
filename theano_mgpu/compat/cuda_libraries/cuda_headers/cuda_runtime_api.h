/* The names of NVIDIA's cuda_runtime_api.h that the headers of cuDNN 7 to 9 use, for machines without CUDA's headers. */
#ifndef THEANO_MGPU_CUDA_RUNTIME_API_H
#define THEANO_MGPU_CUDA_RUNTIME_API_H
#include <stddef.h>
#include <stdint.h>
#include "library_types.h"
typedef struct CUstream_st *cudaStream_t;
typedef struct CUgraph_st *cudaGraph_t;
#endif
