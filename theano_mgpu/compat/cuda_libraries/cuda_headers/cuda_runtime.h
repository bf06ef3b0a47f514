/* The names of NVIDIA's cuda_runtime.h that the headers of cuDNN 7 to 9 use, for machines without CUDA's headers. */
#include "cuda_runtime_api.h"
