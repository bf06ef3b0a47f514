// The API of libcuda: modules, kernels and their launch.
#include "fibres.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace standin;

static const unsigned SHARED_MEMORY = 49152;  // bytes of a block

struct CUfunc_st {
  struct CUmod_st *module;
  const KernelInfo *info;
};

struct CUmod_st {
  uint32_t tag = LIVE_MODULE;
  CUcontext context;
  void *library;
  const ModuleInfo *info;
  std::mutex running;  // threadIdx and the shared memory of a module serve one launch at a time
  std::map<std::string, CUfunc_st> functions;
};
typedef CUmod_st *CUmodule;
typedef CUfunc_st *CUfunction;

// libgpuarray links before it loads; the result is the one image that it adds.
struct CUlinkState_st {
  std::string image;
};
typedef CUlinkState_st *CUlinkState;

API CUresult cuLinkCreate_v2(unsigned, int *, void **, CUlinkState *out) {
  REQUIRE_CONTEXT();
  *out = new CUlinkState_st;
  return SUCCESS;
}

API CUresult cuLinkAddData_v2(CUlinkState link, int, void *data, size_t size, const char *, unsigned, int *, void **) {
  if (size < IMAGE_HEADER || memcmp(data, IMAGE_MAGIC, 8)) return INVALID_PTX;
  link->image.assign((char *)data, size);
  return SUCCESS;
}

API CUresult cuLinkComplete(CUlinkState link, void **image, size_t *size) {
  *image = &link->image[0];
  *size = link->image.size();
  return SUCCESS;
}

API CUresult cuLinkDestroy(CUlinkState link) {
  delete link;
  return SUCCESS;
}

// The first names of these functions, which libgpuarray loads.
API CUresult cuLinkCreate(unsigned count, int *options, void **values, CUlinkState *out) {
  return cuLinkCreate_v2(count, options, values, out);
}
API CUresult cuLinkAddData(CUlinkState link, int type, void *data, size_t size, const char *name, unsigned count,
                           int *options, void **values) {
  return cuLinkAddData_v2(link, type, data, size, name, count, options, values);
}

// Loads the shared object in an image, or returns a null pointer and a message.
static void *load(const char *image, std::string *error) {
  uint64_t left;
  memcpy(&left, image + 8, sizeof left);
  int file = memfd_create("cuda-on-cpu-module", MFD_CLOEXEC);
  for (const char *data = image + IMAGE_HEADER; file >= 0 && left;) {
    ssize_t written = write(file, data, left);
    if (written <= 0) break;
    data += written;
    left -= written;
  }
  if (file < 0 || left) {
    *error = strerror(errno);
    if (file >= 0) close(file);
    return nullptr;
  }
  // dlopen gives what it has loaded from the same path before, and numbers of files are used again. So the path has a
  // serial number: a bit is a slash with or without a dot.
  static std::atomic<unsigned> serial{0};
  std::string path = "/proc/self/fd";
  const unsigned number = ++serial;
  for (unsigned bit = 0; bit < 24; bit++) path += number >> bit & 1 ? "/." : "/";
  path += "/" + std::to_string(file);
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) *error = dlerror();
  close(file);
  return library;
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned, int *, void **) {
  REQUIRE_CONTEXT();
  if (!image || memcmp(image, IMAGE_MAGIC, 8)) return INVALID_IMAGE;
  std::string error;
  void *library = load((const char *)image, &error);
  if (!library) {
    say("cannot load a module: %s", error.c_str());
    return INVALID_IMAGE;
  }
  auto *info = (const ModuleInfo *)dlsym(library, "__standin_module");
  if (!info || info->magic != MODULE_MAGIC) {
    dlclose(library);
    return INVALID_IMAGE;
  }
  *info->barrier = barrier;
  *out = new CUmod_st;
  (*out)->context = context;
  (*out)->library = library;
  (*out)->info = info;
  return SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image) {
  return cuModuleLoadDataEx(out, image, 0, nullptr, nullptr);
}

API CUresult cuModuleUnload(CUmodule module) {
  REQUIRE_INITIALIZED();
  REFUSE_IN_CAPTURE();
  if (!module || module->tag != LIVE_MODULE) return INVALID_HANDLE;
  wait_for_coupled(module->context);
  module->tag = 0;
  dlclose(module->library);
  delete module;
  return SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
  REQUIRE_CONTEXT();
  if (!module || module->tag != LIVE_MODULE) return INVALID_HANDLE;
  auto *info = (const KernelInfo *)dlsym(module->library, (std::string("__standin_kernel_") + name).c_str());
  if (!info) return NOT_FOUND;
  *out = &module->functions.emplace(name, CUfunc_st{module, info}).first->second;
  return SUCCESS;
}

static int capability(const Device *device) { return device->capability_major * 10 + device->capability_minor; }

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
  REQUIRE_INITIALIZED();
  if (!function) return INVALID_HANDLE;
  switch (attribute) {
  case 0: *value = settings.max_threads; break;  // threads of a block
  case 4: *value = 32; break;                    // registers
  case 5: case 6: *value = capability(function->module->context->device); break;  // of PTX and binary
  default: *value = 0;
  }
  return SUCCESS;
}

// A launch in a queue, with a copy of the parameters.
struct Launch {
  CUfunction function;
  Dim3 grid, block;
  unsigned shared;
  std::vector<char> values;
  std::vector<void *> parameters;  // point into `values`

  void copy_parameters(void **given) {
    const KernelInfo *info = function->info;
    size_t total = 16;
    for (int i = 0; i < info->parameter_count; i++) total += round_up(info->sizes[i], 16);
    values.resize(total);
    char *at = (char *)round_up((size_t)values.data(), 16);
    for (int i = 0; i < info->parameter_count; i++) {
      memcpy(at, given[i], info->sizes[i]);
      parameters.push_back(at);
      at += round_up(info->sizes[i], 16);
    }
  }
};

// Whether the kernel's pointers are memory of the worker's device. This finds a wrong device without protection keys
// and names the argument.
static bool check_pointers(const Launch &launch) {
  const KernelInfo *info = launch.function->info;
  Device *device = worker->stream->device;
  for (int i = 0; i < info->parameter_count; i++) {
    if (!info->is_pointer[i]) continue;
    void *address = *(void **)launch.parameters[i];
    if (!address || device->reachable(address, 1)) continue;
    Device *other = owner(address);
    say("device %d: argument %d of kernel %s is %p: %s", device->ordinal, i, info->name, address,
        !other ? "no device's memory" : other == device ? "freed or never allocated" : "another device's memory");
    return false;
  }
  return true;
}

// Runs the blocks of a launch, one after the other, on a worker.
static int run(Launch &launch) {
  if (!check_pointers(launch)) return ILLEGAL_ADDRESS;
  const KernelInfo *kernel = launch.function->info;
  const ModuleInfo *module = launch.function->module->info;
  std::lock_guard<std::mutex> one_launch(launch.function->module->running);
  static thread_local std::vector<char> shared(SHARED_MEMORY + 64);
  *module->dynamic_shared = (void *)round_up((size_t)shared.data(), 64);
  if (settings.poison) memset(*module->dynamic_shared, 0xff, launch.shared);
  *module->block_size = launch.block;
  *module->grid_size = launch.grid;
  const KernelCall call{module, kernel, launch.parameters.data(), launch.block};
  return run_guarded(kernel->name, [&] {
    const Dim3 grid = launch.grid;
    const bool backwards = settings.order != Order::ascending;
    for (unsigned z = 0; z < grid.z; z++)
      for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
          *module->block_index = backwards ? Dim3{grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z} : Dim3{x, y, z};
          if (module->uses_barrier) {
            run_fibres(call);
          } else {
            kernel->run_block(call.parameters);
          }
        }
    return 0;
  });
}

namespace standin {

void spend_launch(Device *device, CallKind kind) {
  device->calls[kind]++;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(settings.launch_us);
  while (std::chrono::steady_clock::now() < end) {}  // a driver computes, too: the caller has nothing of the core
}

}  // namespace standin

// An operation, or the failure that was injected for it. The failure shows at a later call, as on a GPU.
static void enqueue_launch(const StreamRef &stream, const char *what, std::function<int()> operation,
                           bool may_block = true) {
  spend_launch(stream->device, may_block ? LAUNCHES : COLLECTIVES);
  Device *device = stream->device;
  if (capture_of(stream)) {
    operation = [=] {
      const int code = device->launch_fault.next();  // of each launch of the graph
      return code ? code : operation();
    };
  } else if (int code = device->launch_fault.next()) {
    operation = [code] { return code; };
  }
  enqueue(stream, what, std::move(operation), {}, may_block);
}

static bool valid_size(const Dim3 &grid, const Dim3 &block) {
  return grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.x <= 2147483647u && grid.y <= 65535 &&
         grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
         (uint64_t)block.x * block.y * block.z <= (uint64_t)settings.max_threads;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream handle, void **parameters,
                            void **extra) {
  REQUIRE_CONTEXT();
  if (!function || function->module->tag != LIVE_MODULE || function->module->context != context) return INVALID_HANDLE;
  StreamRef stream = stream_of(handle, context);
  if (!stream || stream->context != context) return INVALID_HANDLE;
  const Dim3 grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  if (!valid_size(grid, block) || shared > SHARED_MEMORY || extra) return INVALID_VALUE;
  if (function->info->parameter_count && !parameters) return INVALID_VALUE;
  auto launch = std::make_shared<Launch>();
  launch->function = function;
  launch->grid = grid;
  launch->block = block;
  launch->shared = shared;
  launch->copy_parameters(parameters);
  trace("launch dev%d %s grid %u,%u,%u block %u,%u,%u shared %u", context->device->ordinal, function->info->name,
        grid_x, grid_y, grid_z, block_x, block_y, block_z, shared);
  enqueue_launch(stream, function->info->name, [=] { return run(*launch); });
  return SUCCESS;
}

// An operation of another library, on a stream of the current context.
static CUresult enqueue_foreign(CUstream handle, int (*run)(void *), std::shared_ptr<void> data, const char *what,
                                bool may_block) {
  REQUIRE_CONTEXT();
  StreamRef stream = stream_of(handle, context);
  if (!stream) return INVALID_HANDLE;
  trace("%s dev%d %s", may_block ? "blas" : "nccl", stream->device->ordinal, what);
  enqueue_launch(stream, what, [=] { return run_guarded(what, [&] { return run(data.get()); }); }, may_block);
  return SUCCESS;
}

API CUresult standin_enqueue(CUstream handle, int (*run)(void *), void *data, void (*release)(void *),
                             const char *what) {
  return enqueue_foreign(handle, run, std::shared_ptr<void>(data, release), what, true);
}

API CUresult standin_enqueue_collective(CUstream handle, int (*run)(void *), void *data, void (*release)(void *),
                                        const char *what) {
  return enqueue_foreign(handle, run, std::shared_ptr<void>(data, release), what, false);
}

API int standin_reachable(const void *address, size_t bytes) {
  return worker->stream->device->reachable(address, bytes);
}
