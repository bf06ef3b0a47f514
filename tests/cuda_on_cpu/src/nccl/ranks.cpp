// Communicators: how ranks find each other.
#include "nccl/ranks.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <unistd.h>
#include <vector>

extern "C" {  // the driver's
int cuDeviceGetPCIBusId(char *, int, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxPushCurrent_v2(void *);
int cuCtxPopCurrent_v2(void **);
int cuCtxGetDevice(int *);
}

static std::vector<Comm> &live = *new std::vector<Comm>;  // never freed: streams may run until the process ends
static std::mutex guard;

Comm find(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(guard);
  for (auto &comm : live)
    if (comm.get() == handle) return comm;
  return nullptr;
}

void forget(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(guard);
  live.erase(std::remove_if(live.begin(), live.end(), [&](const Comm &comm) { return comm.get() == handle; }),
             live.end());
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
  if (cuDevicePrimaryCtxRetain(&comm->context, device)) return nullptr;
  cuDeviceGetPCIBusId(comm->shared->ranks[rank].device, 32, device);
  standin_connect(device);
  comm->shared->joined++;
  std::lock_guard<std::mutex> lock(guard);
  live.push_back(comm);
  return comm;
}

int meet(const Comm &comm, const std::string &clique) {
  while (comm->shared->joined < comm->n) {
    if (comm->aborted) return ncclInternalError;
    usleep(200);
  }
  shm_unlink(clique.c_str());
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
