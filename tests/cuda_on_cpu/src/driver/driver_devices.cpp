// The API of libcuda: initialisation, devices and contexts; and the functions that inject faults.
#include "streams.h"

#include <cstring>
#include <pthread.h>

using namespace standin;

namespace standin {
bool initialized = false, forked = false;
}
static std::mutex &init_mutex = *new std::mutex;

// The numbers in CUDA_VISIBLE_DEVICES; the first wrong one hides what follows it.
static std::vector<int> visible_devices() {
  std::vector<int> visible;
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < settings.devices; i++) visible.push_back(i);
    return visible;
  }
  while (*text) {
    char *end;
    long index = strtol(text, &end, 10);
    if (end == text || index < 0 || index >= settings.devices) break;
    visible.push_back((int)index);
    for (text = end; *text == ',' || *text == ' ';) text++;
  }
  return visible;
}

API CUresult cuInit(unsigned flags) {
  if (forked) return NOT_INITIALIZED;
  if (flags) return INVALID_VALUE;
  std::lock_guard<std::mutex> lock(init_mutex);
  if (initialized) return SUCCESS;
  read_settings();
  for (int physical : visible_devices()) {
    Device *device = new Device;
    device->ordinal = (int)devices.size();
    device->physical = physical;
    device->limit = settings.memory;
    const Fault &launch = settings.fail_launch, &allocation = settings.fail_allocation;
    if (physical == launch.device) device->launch_fault.start(launch.count, launch.code);
    if (physical == allocation.device) device->allocation_fault.start(allocation.count, OUT_OF_MEMORY);
    devices.push_back(device);
  }
  if (devices.empty()) return NO_DEVICE;
  // A driver does not survive fork: the workers stay in the parent.
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  install_fault_handlers();
  initialized = true;
  return SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
  if (!version) return INVALID_VALUE;
  if (!initialized) read_settings();  // this call needs no cuInit
  *version = settings.version;
  return SUCCESS;
}

static Device *device_at(int ordinal) {
  return ordinal >= 0 && ordinal < (int)devices.size() ? devices[ordinal] : nullptr;
}

// Declares `device`, or leaves the API call.
#define REQUIRE_DEVICE(ordinal) \
  REQUIRE_INITIALIZED(); \
  Device *device = device_at(ordinal); \
  if (!device) return INVALID_DEVICE

API CUresult cuDeviceGet(int *out, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  *out = device->ordinal;
  return SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
  REQUIRE_INITIALIZED();
  *count = (int)devices.size();
  return SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  const size_t index = device->physical;
  const bool named = index < settings.names.size() && !settings.names[index].empty();
  snprintf(name, length, "%s", named ? settings.names[index].c_str() : "CPU stand-in");
  return SUCCESS;
}

static int bus_of(const Device *device) {
  const size_t index = device->physical;
  return index < settings.buses.size() ? atoi(settings.buses[index].c_str()) : device->physical + 1;
}

API CUresult cuDeviceGetPCIBusId(char *id, int length, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  snprintf(id, length, "0000:%02X:00.0", bus_of(device));
  return SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  *bytes = device->limit;
  return SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  switch (attribute) {
  case 1: *value = settings.max_threads; break;              // threads of a block
  case 2: case 3: *value = 1024; break;                      // size of a block, x and y
  case 4: *value = 64; break;                                // z
  case 5: *value = 2147483647; break;                        // size of a grid, x
  case 6: case 7: *value = 65535; break;                     // y and z
  case 8: *value = 49152; break;                             // bytes of shared memory of a block
  case 9: *value = 65536; break;                             // bytes of constant memory
  case 10: *value = 32; break;                               // threads of a warp
  case 12: case 82: *value = 65536; break;                   // registers of a block and of a multiprocessor
  case 13: *value = 1380000; break;                          // clock, kHz
  case 16: *value = settings.multiprocessors; break;
  case 19: case 31: case 40: case 41: *value = 1; break;     // mapping, concurrent kernels, copies, unified addressing
  case 33: *value = bus_of(device); break;                   // PCI bus
  case 36: *value = 877000; break;                           // clock of the memory, kHz
  case 37: *value = 4096; break;                             // width of the memory's bus, bits
  case 38: *value = 6 << 20; break;                          // bytes of the second cache
  case 39: *value = 2048; break;                             // threads of a multiprocessor
  case 75: *value = settings.capability_major; break;
  case 76: *value = settings.capability_minor; break;
  case 81: *value = 98304; break;                            // bytes of shared memory of a multiprocessor
  default: *value = 0;
  }
  return SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
  REQUIRE_DEVICE(ordinal);
  *flags = device->flags;
  *active = device->retained > 0;
  return SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags(int ordinal, unsigned flags) {
  REQUIRE_DEVICE(ordinal);
  if (device->retained > 0 && settings.version < 11000) return PRIMARY_CONTEXT_ACTIVE;  // allowed since CUDA 11
  device->flags = flags;
  return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  std::lock_guard<std::mutex> lock(init_mutex);
  if (!device->primary) {
    device->primary = new CUctx_st;
    device->primary->device = device;
  }
  install_fault_handlers();
  device->retained++;
  *out = device->primary;
  trace("retain dev%d", ordinal);
  return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease(int ordinal) {
  REQUIRE_DEVICE(ordinal);
  std::lock_guard<std::mutex> lock(init_mutex);
  if (device->retained == 0) return INVALID_CONTEXT;
  trace("release dev%d", ordinal);
  if (--device->retained > 0) return SUCCESS;
  CUcontext context = device->primary;
  wait_until_idle(context);
  device->release_all();
  context->error = CONTEXT_IS_DESTROYED;  // the object stays, as handles to it may still be used by mistake
  device->primary = nullptr;
  device->flags = 0;
  return SUCCESS;
}

API CUresult cuCtxGetDevice(int *ordinal) {
  REQUIRE_INITIALIZED();
  if (!current_context()) return INVALID_CONTEXT;
  *ordinal = current_context()->device->ordinal;
  return SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *out) {
  REQUIRE_INITIALIZED();
  *out = current_context();
  return SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  REQUIRE_INITIALIZED();
  if (!context || context->tag != LIVE_CONTEXT) return INVALID_CONTEXT;
  context_stack.push_back(context);
  return SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *out) {
  REQUIRE_INITIALIZED();
  if (context_stack.empty()) return INVALID_CONTEXT;
  if (out) *out = context_stack.back();
  context_stack.pop_back();
  return SUCCESS;
}

API CUresult cuCtxSynchronize() {
  REQUIRE_CONTEXT();
  wait_until_idle(context);
  return context->error;
}

API void *standin_current_context() { return forked ? nullptr : current_context(); }

// After `launches` more kernels (those of cuBLAS count), `device` fails for good with `code` (0: 719, a failed launch).
// A negative number of launches cancels. The device is counted among the visible ones, as in cuDeviceGet.
API CUresult cudaOnCpuFailAfter(int ordinal, long launches, int code) {
  REQUIRE_DEVICE(ordinal);
  device->launch_fault.start(launches, code ? code : LAUNCH_FAILED);
  return SUCCESS;
}

// After `allocations` more of them, cuMemAlloc on `device` gives CUDA_ERROR_OUT_OF_MEMORY until this is cancelled.
API CUresult cudaOnCpuFailAllocAfter(int ordinal, long allocations) {
  REQUIRE_DEVICE(ordinal);
  device->allocation_fault.start(allocations, OUT_OF_MEMORY);
  return SUCCESS;
}

// The most bytes of `device` that were allocated at one time since the last call.
API CUresult cudaOnCpuPeakMemory(size_t *bytes, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  std::lock_guard<std::mutex> lock(device->mutex);
  *bytes = device->peak;
  device->peak = device->used;
  return SUCCESS;
}

// Sets CALL_KINDS numbers: how often this process has called for each kind of work of `device` since the last call. A copy
// between devices counts for the device of its stream.
API CUresult cudaOnCpuCalls(unsigned long *numbers, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  for (int kind = 0; kind < CALL_KINDS; kind++) numbers[kind] = device->calls[kind].exchange(0);
  return SUCCESS;
}
