/* The names of NVIDIA's library_types.h that the headers of cuDNN use, for machines without CUDA's headers. */
#ifndef __LIBRARY_TYPES_H__ /* NVIDIA's own guard: the headers of cuDNN 7 and 8 ask for it. */
#define __LIBRARY_TYPES_H__
typedef enum libraryPropertyType_t { MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL } libraryPropertyType;
#endif
