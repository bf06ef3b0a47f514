// The threads of a block whose kernel has barriers.
#pragma once
#include "streams.h"

namespace standin {

struct KernelCall {
  const ModuleInfo *module;
  const KernelInfo *kernel;
  void **parameters;
  Dim3 block;  // its size
};

// Runs all threads of the current block on the calling worker.
void run_fibres(const KernelCall &call);

// What a kernel's barriers call.
void barrier(int kind);

}  // namespace standin
