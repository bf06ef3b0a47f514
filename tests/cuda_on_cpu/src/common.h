// Shared by the libraries: the layout of a compiled kernel, messages, and the services of libcuda for libcublas and
// libnccl.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

struct Dim3 {
  unsigned x, y, z;
};

// Every compiled module exports one, `__standin_module`. prelude/kernels.h declares the same layout.
struct ModuleInfo {
  uint64_t magic;
  Dim3 *thread_index, *block_index, *block_size, *grid_size;
  void **dynamic_shared;
  void (**barrier)(int kind);
  int uses_barrier;
};

// Every compiled module exports one for each kernel, `__standin_kernel_<name>`; also declared in prelude/kernels.h.
struct KernelInfo {
  const char *name;
  int parameter_count;
  const unsigned *sizes;
  const unsigned char *is_pointer;
  void (*run_thread)(void **parameters);
  void (*run_block)(void **parameters);  // all threads of a block, one after the other
};

const uint64_t MODULE_MAGIC = 0x31696e646e617473ull;
// What nvrtc calls PTX is this text, the length as 8 bytes, and a shared object of that length.
const char IMAGE_MAGIC[9] = "STANDIN1";
const size_t IMAGE_HEADER = 16;

// Kinds of barrier; prelude/threads.h has the same numbers.
enum { SYNC_BLOCK = 1, SYNC_WARP = 2 };

inline bool environment_flag(const char *name, bool otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtol(value, nullptr, 0) != 0 : otherwise;
}

// A message on stderr, unless CUDA_ON_CPU_QUIET is 1.
__attribute__((format(printf, 1, 2))) inline void say(const char *format, ...) {
  static const bool quiet = environment_flag("CUDA_ON_CPU_QUIET", false);
  if (quiet) return;
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "cuda-on-cpu: %s\n", line);  // one call, so that the lines of two threads do not mix
}

}  // namespace standin

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;

// Services of libcuda for libcublas and libnccl.
extern "C" {
// Calls run(data) on a stream's worker, then release(data). A result other than 0 becomes the context's sticky error.
CUresult standin_enqueue(CUstream stream, int (*run)(void *), void *data, void (*release)(void *), const char *what);
// The same for an operation that waits for operations of other devices: with CUDA_ON_CPU_SYNC=1 it does not block, since
// the others may have to be enqueued first.
CUresult standin_enqueue_collective(CUstream stream, int (*run)(void *), void *data, void (*release)(void *),
                                    const char *what);
// Whether [address, address + bytes) is memory that the worker's device can reach. Call it on the worker only.
int standin_reachable(const void *address, size_t bytes);
void *standin_current_context(void);
// NCCL has connected a device with others: from now on, to free memory of one waits for all that are connected.
void standin_connect(int device);
}
