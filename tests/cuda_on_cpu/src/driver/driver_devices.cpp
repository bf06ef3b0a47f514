// The API of libcuda: initialisation, devices and contexts; and the functions that inject faults.
#include "streams.h"

#include <cstring>
#include <pthread.h>
#include <unistd.h>

using namespace standin;

namespace standin {
bool initialized = false, forked = false;
}
static std::mutex &init_mutex = *new std::mutex;

static int bus_of(int physical) {
  return atoi(of_device(settings.buses, physical, std::to_string(physical + 1).c_str()).c_str());
}

static bool is_slice(int physical) { return of_device(settings.slices, physical, "0") != "0"; }

struct CUuuid {
  unsigned char bytes[16];
};

// The UUID of a card, which its bus gives; of a slice, its number gives the end.
static CUuuid uuid_of(int physical, bool of_slice) {
  CUuuid result = {};
  result.bytes[3] = (unsigned char)bus_of(physical);
  if (of_slice && is_slice(physical)) result.bytes[15] = (unsigned char)(physical + 1);
  return result;
}

static std::string text_of_uuid(int physical) {
  const CUuuid uuid = uuid_of(physical, true);
  char text[64];
  snprintf(text, sizeof text, "%s-000000%02x-0000-0000-0000-0000000000%02x", is_slice(physical) ? "MIG" : "GPU",
           uuid.bytes[3], uuid.bytes[15]);
  return text;
}

// The device of an item of CUDA_VISIBLE_DEVICES: its number, or the beginning of its UUID. -1 for a wrong item.
static int find_device(const std::string &item) {
  if (isdigit(item[0])) return atoi(item.c_str()) < settings.devices ? atoi(item.c_str()) : -1;
  int found = -1;
  for (int i = 0; item.size() > 4 && i < settings.devices; i++)
    if (!text_of_uuid(i).compare(0, item.size(), item)) {
      if (found >= 0) return -1;  // the beginning of two
      found = i;
    }
  return found;
}

// The devices in CUDA_VISIBLE_DEVICES; the first wrong item hides what follows it.
static std::vector<int> visible_devices() {
  std::vector<int> visible;
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < settings.devices; i++) visible.push_back(i);
    return visible;
  }
  while (*text) {
    const size_t length = strcspn(text, ", ");
    const int device = find_device(std::string(text, length));
    if (device < 0) break;
    visible.push_back(device);
    for (text += length; *text == ',' || *text == ' ';) text++;
  }
  return visible;
}

API CUresult cuInit(unsigned flags) {
  if (forked) return NOT_INITIALIZED;
  if (flags) return INVALID_VALUE;
  std::lock_guard<std::mutex> lock(init_mutex);
  if (initialized) return SUCCESS;
  read_settings();
  const char *refusal = getenv("CUDA_ON_CPU_INIT");
  while (refusal && atoi(refusal) < 0) pause();
  if (refusal && atoi(refusal)) return (CUresult)atoi(refusal);
  for (int physical : visible_devices()) {
    Device *device = new Device;
    device->ordinal = (int)devices.size();
    device->physical = physical;
    device->limit = bytes_of(of_all(settings.memories, physical, "2G"));
    device->multiprocessors = atoi(of_all(settings.multiprocessors, physical, "80").c_str());
    const std::string capability = of_all(settings.capabilities, physical, "7.0");
    device->capability_major = device->capability_minor = 0;
    sscanf(capability.c_str(), "%d.%d", &device->capability_major, &device->capability_minor);
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
  snprintf(name, length, "%s", of_device(settings.names, device->physical, "CPU stand-in").c_str());
  return SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *id, int length, int ordinal) {
  REQUIRE_DEVICE(ordinal);
  snprintf(id, length, "0000:%02X:00.0", bus_of(device->physical));
  return SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *out, int ordinal) {  // of the card
  REQUIRE_DEVICE(ordinal);
  *out = uuid_of(device->physical, false);
  return SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *out, int ordinal) {  // of the slice, if the device is one
  REQUIRE_DEVICE(ordinal);
  *out = uuid_of(device->physical, true);
  return SUCCESS;
}

// Whether a device may have access to another one; slices of cards may not.
static bool can_access(const Device *device, const Device *other) {
  return device != other && settings.peer_access != PeerAccess::none && !is_slice(device->physical) &&
         !is_slice(other->physical);
}

API CUresult cuDeviceCanAccessPeer(int *out, int ordinal, int peer) {
  REQUIRE_DEVICE(ordinal);
  if (!device_at(peer)) return INVALID_DEVICE;
  *out = can_access(device, device_at(peer));
  return SUCCESS;
}

// Gives the current context's device access to another one, or takes it.
static CUresult set_access(CUcontext peer, bool access) {
  REQUIRE_CONTEXT();
  if (!peer || peer->tag != LIVE_CONTEXT) return INVALID_CONTEXT;
  Device *device = context->device, *other = peer->device;
  if (access && !can_access(device, other)) return PEER_ACCESS_UNSUPPORTED;
  trace("%s access dev%d -> dev%d", access ? "enable" : "disable", device->ordinal, other->ordinal);
  const uint64_t bit = 1ull << other->ordinal;
  const bool had = (access ? device->peers.fetch_or(bit) : device->peers.fetch_and(~bit)) & bit;
  if (access) return had ? PEER_ACCESS_ALREADY_ENABLED : SUCCESS;
  return had ? SUCCESS : PEER_ACCESS_NOT_ENABLED;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  return flags ? (CUresult)INVALID_VALUE : set_access(peer, true);
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer) { return set_access(peer, false); }

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
  case 16: *value = device->multiprocessors; break;
  case 19: case 31: case 40: case 41: *value = 1; break;     // mapping, concurrent kernels, copies, unified addressing
  case 33: *value = bus_of(device->physical); break;         // PCI bus
  case 36: *value = 877000; break;                           // clock of the memory, kHz
  case 37: *value = 4096; break;                             // width of the memory's bus, bits
  case 38: *value = 6 << 20; break;                          // bytes of the second cache
  case 39: *value = 2048; break;                             // threads of a multiprocessor
  case 75: *value = device->capability_major; break;
  case 76: *value = device->capability_minor; break;
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
  REFUSE_IN_CAPTURE();
  wait_until_idle(context);
  return context->error;
}

API void standin_connect(int ordinal) {
  if (Device *device = device_at(ordinal)) device->is_connected = true;
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
