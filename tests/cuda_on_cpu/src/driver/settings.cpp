// Reads the settings; error names and texts; the trace.
#include "settings.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <time.h>
#include <unistd.h>

namespace standin {

Settings settings;

static const struct {
  int code;
  const char *name, *text;
} ERRORS[] = {
  {SUCCESS, "CUDA_SUCCESS", "no error"},
  {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
  {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
  {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
  {PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
  {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
  {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
  {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
  {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
  {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
  {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
  {PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
  {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
  {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
  {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
  {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
   "operation failed due to a previous error during capture"},
  {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
   "dependency created on uncaptured work in another stream"},
  {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
   "attempt to terminate a thread-local capture sequence from another thread"},
};

static const char *variable(const char *name) {
  const char *value = getenv((std::string("CUDA_ON_CPU_") + name).c_str());
  return value && *value ? value : nullptr;
}

static long number(const char *name, long otherwise) {
  const char *value = variable(name);
  return value ? strtol(value, nullptr, 0) : otherwise;
}

size_t bytes_of(const std::string &text) {
  char *end;
  double result = strtod(text.c_str(), &end);
  switch (*end) {
  case 'k': case 'K': return (size_t)(result * 1024);
  case 'm': case 'M': return (size_t)(result * 1024 * 1024);
  case 'g': case 'G': return (size_t)(result * 1024 * 1024 * 1024);
  }
  return (size_t)result;
}

// DEVICE:COUNT, or DEVICE:COUNT:CODE.
static Fault fault(const char *name) {
  Fault result;
  const char *value = variable(name);
  if (value && sscanf(value, "%d:%ld:%d", &result.device, &result.count, &result.code) < 2) {
    say("CUDA_ON_CPU_%s=%s is ignored: it is not DEVICE:COUNT", name, value);
    result.device = -1;
  }
  return result;
}

static Order order() {
  const char *value = variable("ORDER");
  if (!value) return Order::ascending;
  if (!strcmp(value, "reverse")) return Order::reverse;
  if (!strcmp(value, "shuffle")) return Order::shuffle;
  say("CUDA_ON_CPU_ORDER=%s is ignored: it is neither reverse nor shuffle", value);
  return Order::ascending;
}

static PeerAccess peer_access() {
  const char *value = variable("PEER");
  if (!value || !strcmp(value, "none")) return PeerAccess::none;
  if (!strcmp(value, "all")) return PeerAccess::all;
  if (!strcmp(value, "broken")) return PeerAccess::broken;
  say("CUDA_ON_CPU_PEER=%s is ignored: it is none, all or broken", value);
  return PeerAccess::none;
}

// Texts that are separated by semicolons, one for each device.
static std::vector<std::string> list(const char *name) {
  std::vector<std::string> result;
  const char *value = variable(name);
  while (value) {
    const char *end = strchr(value, ';');
    result.push_back(end ? std::string(value, end) : value);
    value = end ? end + 1 : nullptr;
  }
  return result;
}

std::string of_device(const std::vector<std::string> &values, int physical, const char *otherwise) {
  return (size_t)physical < values.size() && !values[physical].empty() ? values[physical] : otherwise;
}

std::string of_all(const std::vector<std::string> &values, int physical, const char *otherwise) {
  return of_device(values, values.size() == 1 ? 0 : physical, otherwise);
}

void read_settings() {
  static bool done = false;
  if (done) return;
  done = true;
  settings.devices = (int)number("DEVICES", 2);
  settings.version = (int)number("VERSION", 10020);
  settings.max_threads = (int)std::min(number("MAX_THREADS", MAX_THREADS), (long)MAX_THREADS);
  settings.synchronous = number("SYNC", 0) != 0;
  settings.strict_free = number("STRICT_FREE", 1) != 0;
  settings.poison = number("POISON", 1) != 0;
  settings.guard = number("GUARD", 1) != 0;
  settings.protection_keys = number("PKEYS", 1) != 0;
  settings.delay_us = number("DELAY_US", 0);
  settings.launch_us = number("LAUNCH_US", 0);
  settings.copy_rate = number("COPY_RATE", 0);
  settings.pageable_rate = number("PAGEABLE_RATE", settings.copy_rate);
  settings.staged_rate = number("STAGED_RATE", 0);
  settings.seed = (unsigned)number("SEED", getpid());
  settings.order = order();
  settings.peer_access = peer_access();
  settings.fail_launch = fault("FAIL");
  settings.fail_allocation = fault("FAIL_ALLOC");
  settings.names = list("NAMES");
  settings.buses = list("BUSES");
  settings.slices = list("SLICES");
  settings.capabilities = list("CC");
  settings.memories = list("MEMORY");
  settings.multiprocessors = list("SMS");
  for (const std::string &factor : list("SLOWNESS")) settings.slowness.push_back(atof(factor.c_str()));
  const char *file = variable("TRACE");
  settings.trace = !file ? nullptr : !strcmp(file, "-") ? stderr : fopen(file, "a");
  if (file && !settings.trace) say("cannot write to CUDA_ON_CPU_TRACE=%s: %s", file, strerror(errno));
}

void trace(const char *format, ...) {
  if (!settings.trace) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  fprintf(settings.trace, "%ld.%06ld %d %s\n", (long)now.tv_sec, now.tv_nsec / 1000, (int)getpid(), line);
  fflush(settings.trace);
}

}  // namespace standin

using namespace standin;

API CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = nullptr;
  for (auto &entry : ERRORS)
    if (entry.code == error) *name = entry.name;
  return *name ? SUCCESS : INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = nullptr;
  for (auto &entry : ERRORS)
    if (entry.code == error) *text = entry.text;
  return *text ? SUCCESS : INVALID_VALUE;
}
