/* The names of NVIDIA's driver_types.h that the headers of cuDNN 7 use, for machines without CUDA's headers. */
#include "cuda_runtime_api.h"
