// Compiles a kernel's source with g++, or takes the result from the cache on disk.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace standin {

struct Source {
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
};

enum class Outcome { compiled, source_error, internal_error };

// Compiles for a value of __CUDA_ARCH__ (700 is compute capability 7.0). `object` gets the bytes of the shared object
// and `log` what the compiler wrote, or why it did not run.
Outcome compile(const Source &source, int architecture, std::string *object, std::string *log);

}  // namespace standin
