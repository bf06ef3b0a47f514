// The API of libcuda: memory and copies.
//
// Copies from pageable memory are staged: the call returns and the source may change. One of more than 64 kB waits for the
// stream first, and returns when it is done. So do copies to pageable memory. Pinned memory is read and written when the
// copy runs.
#include "streams.h"

#include <chrono>
#include <cstring>
#include <thread>

using namespace standin;

static const size_t STAGED_AT_ONCE = 64 << 10;  // bytes of a copy from pageable memory that needs no wait

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  REQUIRE_CONTEXT();
  Device *device = context->device;
  std::lock_guard<std::mutex> lock(device->mutex);
  *total = device->limit;
  *free = device->limit - device->used;
  return SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  REQUIRE_CONTEXT();
  REFUSE_IN_CAPTURE();
  if (!bytes) return INVALID_VALUE;
  CUdeviceptr address = 0;
  CUresult result = context->device->allocate(bytes, &address);
  trace("alloc dev%d %zu -> %d %#llx", context->device->ordinal, bytes, result, address);
  if (!result) *out = address;
  return result;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
  REQUIRE_CONTEXT();
  REFUSE_IN_CAPTURE();
  if (!address) return SUCCESS;
  Device *device = owner((void *)address);
  if (!device) return INVALID_VALUE;
  trace("free dev%d %#llx", device->ordinal, address);
  if (device->primary) wait_for_coupled(device->primary);
  return device->release((char *)address);
}

API CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
  REQUIRE_CONTEXT();
  REFUSE_IN_CAPTURE();
  if (!bytes) return INVALID_VALUE;
  if (settings.strict_free) wait_for_coupled(context);  // it maps the memory in all contexts
  *out = allocate_pinned(bytes);
  return *out ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuMemFreeHost(void *address) {
  REQUIRE_INITIALIZED();
  REFUSE_IN_CAPTURE();
  if (!current_context()) return INVALID_CONTEXT;
  wait_for_coupled(current_context());
  return release_pinned(address) ? SUCCESS : INVALID_VALUE;
}

// Declares `context` and `queue`, or leaves the API call. With unified addressing the stream decides on the device, and
// may belong to a context that is not current.
#define REQUIRE_COPY(bytes, stream) \
  REQUIRE_CONTEXT(); \
  if (!bytes) return SUCCESS; \
  StreamRef queue = stream_of(stream, context); \
  if (!queue) return INVALID_HANDLE

// Whether a range is memory of the device, with a message where it is not.
static bool check(const char *what, const char *role, Device *device, const void *address, size_t bytes) {
  if (device->reachable(address, bytes)) return true;
  say("%s: the %s %p (%zu bytes) is not on device %d", what, role, address, bytes, device->ordinal);
  return false;
}

// Copies, on a worker. One side may be memory of the host.
static int copy(const char *what, void *to, bool to_device, const void *from, bool from_device, size_t bytes) {
  Device *device = worker->stream->device;
  if (to_device && !check(what, "destination", device, to, bytes)) return ILLEGAL_ADDRESS;
  if (from_device && !check(what, "source", device, from, bytes)) return ILLEGAL_ADDRESS;
  return run_guarded(what, [&] {
    memmove(to, from, bytes);
    return 0;
  });
}

// Calls a function, and takes as long as a rate allows for some bytes.
template <class F> static int at_rate(long rate, size_t bytes, F run) {
  const auto begun = std::chrono::steady_clock::now();
  const int result = run();
  if (rate > 0) std::this_thread::sleep_until(begun + std::chrono::nanoseconds(1000 * bytes / (size_t)rate));
  return result;
}

static CUresult copy_to_device(CUdeviceptr to, const void *from, size_t bytes, CUstream stream, bool synchronous) {
  REQUIRE_COPY(bytes, stream);
  if (owner(from)) return INVALID_VALUE;
  if (synchronous) REFUSE_IN_CAPTURE();
  queue->device->calls[TO_DEVICE]++;
  trace("HtoD dev%d %zu", queue->device->ordinal, bytes);
  std::shared_ptr<char> staged;
  const bool later = is_pinned(from, bytes) || capture_of(queue), waits = !later && bytes > STAGED_AT_ONCE;
  const long rate = waits ? settings.pageable_rate : settings.copy_rate;
  if (waits) last_position(queue).wait();
  if (!later) {
    staged.reset((char *)malloc(bytes), free);
    if (!staged) return OUT_OF_MEMORY;
    memcpy(staged.get(), from, bytes);
  }
  Position end = enqueue(queue, "cuMemcpyHtoD", [=] {
    return at_rate(rate, bytes, [&] {
      return copy("cuMemcpyHtoD", (void *)to, true, staged ? staged.get() : from, false, bytes);
    });
  });
  if (!synchronous && !waits) return SUCCESS;
  end.wait();
  return queue->context->error;
}

static CUresult copy_to_host(void *to, CUdeviceptr from, size_t bytes, CUstream stream, bool synchronous) {
  REQUIRE_COPY(bytes, stream);
  if (owner(to)) return INVALID_VALUE;
  if (synchronous) REFUSE_IN_CAPTURE();
  queue->device->calls[TO_HOST]++;
  trace("DtoH dev%d %zu", queue->device->ordinal, bytes);
  const bool pinned = is_pinned(to, bytes);
  const long rate = pinned || bytes <= STAGED_AT_ONCE ? settings.copy_rate : settings.pageable_rate;
  Position end = enqueue(queue, "cuMemcpyDtoH", [=] {
    return at_rate(rate, bytes, [&] { return copy("cuMemcpyDtoH", to, false, (void *)from, true, bytes); });
  });
  if (!synchronous && pinned) return SUCCESS;
  end.wait();
  return queue->context->error;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  return copy_to_device(to, from, bytes, stream, false);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  return copy_to_device(to, from, bytes, nullptr, true);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_to_host(to, from, bytes, stream, false);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  return copy_to_host(to, from, bytes, nullptr, true);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  REQUIRE_COPY(bytes, stream);
  queue->device->calls[ON_DEVICE]++;
  trace("DtoD dev%d %zu", queue->device->ordinal, bytes);
  enqueue(queue, "cuMemcpyDtoD", [=] {
    return copy("cuMemcpyDtoD", (void *)to, true, (void *)from, true, bytes);
  });
  return SUCCESS;
}

// Gives the worker access to another device for the time of a copy.
static int copy_between(Device *to_device, void *to, Device *from_device, const void *from, size_t bytes, bool broken) {
  const char *what = "cuMemcpyPeer";
  if (!to_device->contains(to, bytes) || !from_device->contains(from, bytes)) {
    say("%s: an address that is not on its device", what);
    return ILLEGAL_ADDRESS;
  }
  to_device->allow(true);
  from_device->allow(true);
  int result = run_guarded(what, [&] {
    memmove(to, from, bytes);
    if (broken) ((char *)to)[bytes / 2] ^= 1;
    return 0;
  });
  worker->stream->device->allow_all();
  return result;
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                               size_t bytes, CUstream stream) {
  REQUIRE_COPY(bytes, stream);
  if (!to_context || !from_context) return INVALID_HANDLE;
  Device *to_device = to_context->device, *from_device = from_context->device;
  queue->device->calls[BETWEEN_DEVICES]++;
  const bool direct = queue->device == to_device ? to_device->has_peer(from_device) : from_device->has_peer(to_device);
  const bool broken = direct && settings.peer_access == PeerAccess::broken;
  const long rate = direct || to_device == from_device ? 0 : settings.staged_rate;
  trace("peer dev%d -> dev%d %zu %s", from_device->ordinal, to_device->ordinal, bytes, direct ? "direct" : "staged");
  enqueue(queue, "cuMemcpyPeer", [=] {
    return at_rate(rate, bytes, [&] {
      return copy_between(to_device, (void *)to, from_device, (void *)from, bytes, broken);
    });
  });
  return SUCCESS;
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  REQUIRE_COPY(bytes, stream);
  enqueue(queue, "cuMemsetD8", [=] {
    if (!check("cuMemsetD8", "destination", worker->stream->device, (void *)to, bytes)) return (int)ILLEGAL_ADDRESS;
    return run_guarded("cuMemsetD8", [&] {
      memset((void *)to, value, bytes);
      return 0;
    });
  });
  return SUCCESS;
}

// libgpuarray looks for these functions, and nothing here calls them.
struct CUipcMemHandle {
  char reserved[64];
};
// NVIDIA's NVRTC asks for tables of the driver's private functions, and works without them.
API CUresult cuGetExportTable(const void **table, const void *) {
  if (table) *table = nullptr;
  return NOT_SUPPORTED;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr) { return NOT_SUPPORTED; }
API CUresult cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned) { return NOT_SUPPORTED; }
API CUresult cuIpcCloseMemHandle(CUdeviceptr) { return NOT_SUPPORTED; }
