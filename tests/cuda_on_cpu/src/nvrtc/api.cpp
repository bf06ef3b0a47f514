// The API of libnvrtc that libgpuarray calls. See compile.cpp for what a compilation does.
#include "common.h"
#include "compile.h"

#include <cstring>
#include <set>

using namespace standin;
using std::string;

enum {
  NVRTC_SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11
};

struct _nvrtcProgram {
  Source source;
  string log, image;
};
typedef _nvrtcProgram *nvrtcProgram;

// The architectures that some release of nvrtc since CUDA 10 accepts, times 10.
static const std::set<int> ARCHITECTURES = {
  300, 320, 350, 370, 500, 520, 530, 600, 610, 620, 700, 720, 750, 800, 860, 870, 880, 890, 900, 1000, 1010, 1030, 1100,
  1200, 1210
};

API const char *nvrtcGetErrorString(int result) {
  switch (result) {
  case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
  case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
  case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
  case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
  case COMPILATION: return "NVRTC_ERROR_COMPILATION";
  case INTERNAL_ERROR: return "NVRTC_ERROR_INTERNAL_ERROR";
  }
  return "NVRTC_ERROR unknown";
}

// The same version as the driver's.
API int nvrtcVersion(int *major, int *minor) {
  const char *setting = getenv("CUDA_ON_CPU_VERSION");
  int version = setting && *setting ? atoi(setting) : 10020;
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return NVRTC_SUCCESS;
}

API int nvrtcCreateProgram(nvrtcProgram *out, const char *text, const char *, int count, const char **headers,
                           const char **names) {
  if (!text || !out) return INVALID_INPUT;
  *out = new _nvrtcProgram;
  (*out)->source.text = text;
  for (int i = 0; i < count; i++) (*out)->source.headers.emplace_back(names[i], headers[i]);
  return NVRTC_SUCCESS;
}

API int nvrtcDestroyProgram(nvrtcProgram *program) {
  if (!program || !*program) return INVALID_PROGRAM;
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

API int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size) {
  if (!program) return INVALID_PROGRAM;
  *size = program->log.size() + 1;
  return NVRTC_SUCCESS;
}

API int nvrtcGetProgramLog(nvrtcProgram program, char *log) {
  if (!program) return INVALID_PROGRAM;
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return NVRTC_SUCCESS;
}

API int nvrtcGetPTXSize(nvrtcProgram program, size_t *size) {
  if (!program || program->image.empty()) return INVALID_PROGRAM;
  *size = program->image.size();
  return NVRTC_SUCCESS;
}

API int nvrtcGetPTX(nvrtcProgram program, char *ptx) {
  if (!program || program->image.empty()) return INVALID_PROGRAM;
  memcpy(ptx, program->image.data(), program->image.size());
  return NVRTC_SUCCESS;
}

// The architecture that an option names, such as compute_70 or --gpu-architecture=sm_70, times 10; 0 without one and -1
// for one that is not a number.
static int architecture_of(const string &option) {
  for (const string prefix : {"compute_", "sm_"}) {
    size_t at = option.find(prefix);
    if (at == string::npos) continue;
    int number = atoi(option.c_str() + at + prefix.size());
    return number > 0 ? number * 10 : -1;
  }
  return 0;
}

API int nvrtcCompileProgram(nvrtcProgram program, int count, const char **options) {
  if (!program) return INVALID_PROGRAM;
  int architecture = 300;  // nvrtc's default in CUDA 10
  for (int i = 0; i < count; i++) {
    int found = architecture_of(options[i]);
    if (!found) continue;
    architecture = found;
    if (!ARCHITECTURES.count(found)) {
      program->log = string("nvrtc: error: invalid value for --gpu-architecture (-arch): ") + options[i];
      return INVALID_OPTION;
    }
  }
  string object;
  Outcome outcome = compile(program->source, architecture, &object, &program->log);
  if (outcome != Outcome::compiled) {
    say("a kernel does not compile:\n%s", program->log.substr(0, 3000).c_str());
    return outcome == Outcome::source_error ? COMPILATION : INTERNAL_ERROR;
  }
  uint64_t size = object.size();
  program->image.assign(IMAGE_MAGIC, 8);
  program->image.append((const char *)&size, sizeof size);
  program->image += object;
  return NVRTC_SUCCESS;
}
