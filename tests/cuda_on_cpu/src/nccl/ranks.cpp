// Communicators: how ranks find each other.
#include "nccl/ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

extern "C" {  // the driver's
int cuDeviceGetPCIBusId(char *, int, int);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxPushCurrent_v2(void *);
int cuCtxPopCurrent_v2(void **);
int cuCtxGetDevice(int *);
}

static std::vector<Comm> &live = *new std::vector<Comm>;  // never freed: streams may run until the process ends
static std::vector<ncclComm_t> gone;
static std::mutex guard;

// A size in bytes, maybe with K, M or G.
static size_t bytes(const char *name, size_t otherwise) {
  const char *value = getenv(name);
  if (!value || !*value) return otherwise;
  char *end;
  const size_t number = strtoull(value, &end, 0);
  return number << (*end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0);
}

[[noreturn]] static void end_process(const char *what, int rank) {
  fprintf(stderr, "cuda-on-cpu: %s (rank %d): the process ends\n", what, rank);  // also where it is to be quiet
  abort();
}

Comm find(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(guard);
  for (auto &comm : live)
    if (comm.get() == handle) {
      if (comm->left) end_process("a communicator is used after it was destroyed or aborted", comm->rank);
      return comm;
    }
  if (std::find(gone.begin(), gone.end(), handle) != gone.end())
    end_process("a communicator is used after it was freed", -1);
  return nullptr;
}

int leave(const Comm &comm) {
  std::vector<Comm> all;
  {
    std::lock_guard<std::mutex> lock(guard);
    comm->left = true;
    for (auto &each : live)
      if (each->clique == comm->clique) all.push_back(each);
    for (auto &each : all)
      if (!each->left) return ncclSuccess;
  }
  static const size_t abort_ms = bytes("CUDA_ON_CPU_NCCL_ABORT_MS", 10);
  if (comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(abort_ms));  // no signal ends it
  for (auto &each : all) {
    if (each->calls) end_process("a communicator is freed while a call uses it", each->rank);
    Current current(each->context);
    if (each->memory) cuMemFree_v2(each->memory);  // which waits for the device
  }
  std::lock_guard<std::mutex> lock(guard);
  for (auto &each : all) {
    gone.push_back(each.get());
    live.erase(std::find(live.begin(), live.end(), each));
  }
  return ncclSuccess;
}

Comm join(const std::string &clique, int n, int rank, int device) {
  int file = shm_open(clique.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0) return nullptr;
  void *memory = ftruncate(file, sizeof(Shared)) ? MAP_FAILED :
                 mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  Comm comm = std::make_shared<ncclComm>();
  comm->shared = (Shared *)memory;
  comm->n = n;
  comm->rank = rank;
  comm->device = device;
  comm->clique = clique;
  if (cuDevicePrimaryCtxRetain(&comm->context, device)) return nullptr;
  cuDeviceGetPCIBusId(comm->shared->ranks[rank].device, 32, device);
  standin_connect(device);
  comm->shared->joined++;
  std::lock_guard<std::mutex> lock(guard);
  live.push_back(comm);
  gone.erase(std::remove(gone.begin(), gone.end(), comm.get()), gone.end());  // the address is used again
  return comm;
}

int connect(const std::vector<Comm> &comms) {
  static const size_t size = bytes("CUDA_ON_CPU_NCCL_MEMORY", 1 << 20);
  std::vector<Comm> fresh;
  for (auto &comm : comms)
    if (!comm->connected && std::find(fresh.begin(), fresh.end(), comm) == fresh.end()) fresh.push_back(comm);
  for (auto &comm : fresh) {
    Current current(comm->context);
    if (size && !comm->memory && cuMemAlloc_v2(&comm->memory, size)) {
      standin::say("rank %d: no memory of %zu bytes on device %d", comm->rank, size, comm->device);
      return ncclUnhandledCudaError;
    }
  }
  for (auto &comm : fresh) comm->connected = true, comm->shared->connected++;
  for (auto &comm : fresh)
    while (comm->shared->connected < comm->n) {
      for (auto &each : fresh)  // one that is aborted ends the call for all
        if (each->aborted) return ncclInternalError;
      usleep(200);
    }
  return ncclSuccess;
}

void end_or_hang(const ncclComm &comm, bool hangs) {
  static const bool each_hangs = standin::environment_flag("CUDA_ON_CPU_NCCL_HANG", false);
  while ((hangs || each_hangs) && !comm.aborted) usleep(200);
}

int meet(const Comm &comm) {
  while (comm->shared->joined < comm->n) {
    if (comm->aborted) return ncclInternalError;
    usleep(200);
  }
  shm_unlink(comm->clique.c_str());
  auto &ranks = comm->shared->ranks;
  for (int rank = 0; rank < comm->n; rank++)
    if (rank != comm->rank && !strcmp(ranks[rank].device, ranks[comm->rank].device)) {
      standin::say("ranks %d and %d are both on device %s", rank, comm->rank, ranks[rank].device);
      return ncclInvalidUsage;
    }
  return ncclSuccess;
}

Current::Current(void *context) {
  int before;
  void *zero;
  if (cuCtxGetDevice(&before) && !cuDevicePrimaryCtxRetain(&zero, 0)) cuCtxPushCurrent_v2(zero);
  cuCtxPushCurrent_v2(context);
}
Current::~Current() { cuCtxPopCurrent_v2(nullptr); }
