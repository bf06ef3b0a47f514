// Turns CUDA C++ into C++ that g++ compiles.
#pragma once
#include <string>
#include <vector>

namespace standin {

// The source with dynamic shared memory and PTX assembler replaced by C++.
std::string rewrite(const std::string &source);

// The names of a source's kernels. A name may be a macro.
std::vector<std::string> kernel_names(const std::string &source);

// Whether a source synchronises threads, so that the threads of a block cannot run one after the other.
bool uses_barrier(const std::string &source);

}  // namespace standin
