// The settings (the variables CUDA_ON_CPU_*, read once by cuInit), the error codes of CUDA, and the trace.
#pragma once
#include "common.h"

#include <string>
#include <vector>

namespace standin {

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217, INVALID_PTX = 218,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
  ILLEGAL_ADDRESS = 700, PEER_ACCESS_ALREADY_ENABLED = 704, PEER_ACCESS_NOT_ENABLED = 705,
  PRIMARY_CONTEXT_ACTIVE = 708, CONTEXT_IS_DESTROYED = 709, LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905,
  CAPTURE_WRONG_THREAD = 908
};

enum class Order { ascending, reverse, shuffle };
// Whether devices can have access to each other's memory; broken: copies between those that have it give wrong bytes.
enum class PeerAccess { none, all, broken };

// A fault for device `device`, after `count` launches or allocations; device -1 is no fault.
struct Fault {
  int device = -1;
  long count = 0;
  int code = LAUNCH_FAILED;
};

struct Settings {
  int devices, version, max_threads;
  bool synchronous, strict_free, poison, guard, protection_keys;
  long delay_us, launch_us;
  long copy_rate, pageable_rate, staged_rate;  // bytes a microsecond; 0 is no limit
  unsigned seed;
  Order order;
  PeerAccess peer_access;
  Fault fail_launch, fail_allocation;
  std::vector<std::string> names, buses, slices, capabilities, memories, multiprocessors;  // see `of_device`
  std::vector<double> slowness;  // how many times as long each device takes
  FILE *trace;
};
extern Settings settings;
const unsigned MAX_THREADS = 1024;  // of a block, as on every GPU

void read_settings();
// The value for a device, numbered before CUDA_VISIBLE_DEVICES is applied; `otherwise` where it has none.
std::string of_device(const std::vector<std::string> &values, int physical, const char *otherwise);
// The same, where a single value is that of all devices.
std::string of_all(const std::vector<std::string> &values, int physical, const char *otherwise);
size_t bytes_of(const std::string &text);  // such as 64M or 1.5G

// A line in CUDA_ON_CPU_TRACE, after the time in seconds and the process id.
__attribute__((format(printf, 1, 2))) void trace(const char *format, ...);

}  // namespace standin
