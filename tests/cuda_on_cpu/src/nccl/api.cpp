// The functions of libnccl.so.2.
//
// As with NCCL, a rank whose peer never comes waits until ncclCommAbort, ranks on one device are refused, and a thread
// without a current context gets that of device 0. Where NCCL may hang because one thread calls for two ranks outside
// of a group, this is an error.
#include "nccl/ranks.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <unistd.h>
#include <vector>

extern "C" {  // the driver's
int cuInit(unsigned);
int cuDeviceGetCount(int *);
int cuCtxGetDevice(int *);
}

namespace {
std::atomic<long> groups_to_fault{-1};
std::atomic<int> fault{0};

struct Work {
  Comm comm;
  std::function<int(int fault)> run;
  bool is_collective;
};
struct Messages {
  Comm comm;
  cudaStream_t stream;
  std::vector<Message> all;
};
// The group of a thread.
thread_local int depth = 0, failed = 0;
thread_local std::vector<Work> group;
thread_local std::vector<Messages> messages;
thread_local std::vector<Comm> aborted;
std::atomic<size_t> received[64];  // bytes, by device

ncclResult_t result_of(int code) { return (ncclResult_t)code; }

void read_fault() {
  static const bool once = [] {
    long groups;
    int kind;
    const char *value = getenv("CUDA_ON_CPU_NCCL_FAIL");
    if (value && sscanf(value, "%ld:%d", &groups, &kind) == 2) groups_to_fault = groups, fault = kind;
    return true;
  }();
  (void)once;
}

// The fault of this group of collectives: 0, a code of NCCL, WRONG_RESULT or NEVER_ENDS.
int next_fault() {
  read_fault();
  if (groups_to_fault < 0) return 0;
  return groups_to_fault-- == 0 ? fault.load() : 0;
}

int run_all(std::vector<Work> works, int result) {
  static const char *const delay = getenv("CUDA_ON_CPU_NCCL_DELAY_US");  // between two ranks: finds a missing order
  std::vector<Comm> exchanging;
  for (auto &work : works) {
    work.comm->calls++;
    if (work.is_collective) exchanging.push_back(work.comm);
  }
  const int code = exchanging.empty() ? 0 : next_fault();
  if (code && code < WRONG_RESULT && !result) result = code;
  if (!result) result = connect(exchanging);
  for (auto &work : works) {  // after an error nothing of the group runs
    if (!result) result = work.run(code);
    if (delay && *delay) usleep(rand() % atoi(delay));
  }
  for (auto &work : works) work.comm->calls--;
  return result;
}

ncclResult_t later(Work work) {
  if (depth == 0) return result_of(run_all({std::move(work)}, ncclSuccess));
  group.push_back(std::move(work));
  return ncclSuccess;
}

ncclResult_t refuse(int code) {
  if (depth && !failed) failed = code;
  return result_of(code);
}

// Runs the group, and its messages after its collectives: NCCL does not keep the order of calls between the two.
int end_group() {
  auto works = std::move(group);
  for (auto &each : messages)
    works.push_back({each.comm, [each](int fault) {
      return enqueue_messages(each.comm, each.all, fault, each.stream) ? ncclUnhandledCudaError : ncclSuccess;
    }, true});
  const int result = failed;
  auto left = std::move(aborted);
  group.clear();
  messages.clear();
  aborted.clear();
  failed = 0;
  const int code = run_all(std::move(works), result);
  for (auto &comm : left) leave(comm);
  return code;
}

// Whether this thread calls for another rank, too, outside of a group: NCCL may wait for that rank in the call itself.
bool waits_for_itself(const Comm &comm, const char *name) {
  if (depth) return false;
  auto &ranks = comm->shared->ranks;
  ranks[comm->rank].thread = gettid();
  for (int rank = 0; rank < comm->n; rank++) {
    if (rank == comm->rank || ranks[rank].thread != gettid()) continue;
    standin::say("%s: one thread calls for ranks %d and %d outside of a group", name, rank, comm->rank);
    return true;
  }
  return false;
}

ncclResult_t message(bool sends, const void *address, size_t count, int dtype, int peer, ncclComm_t handle,
                     cudaStream_t stream) {
  Comm comm = find(handle);
  if (!comm || dtype < 0 || dtype > 9 || peer < 0 || peer >= comm->n) return refuse(ncclInvalidArgument);
  if (comm->aborted) return refuse(ncclInvalidUsage);
  if (count == 0) return ncclSuccess;
  if (waits_for_itself(comm, sends ? "ncclSend" : "ncclRecv")) return ncclInvalidUsage;
  auto own = std::find_if(messages.begin(), messages.end(),
                          [&](const Messages &each) { return each.comm == comm && each.stream == stream; });
  if (own == messages.end()) own = messages.insert(own, {comm, stream, {}});
  own->all.push_back({sends, peer, (char *)address, count * size_of(dtype)});
  return depth ? ncclSuccess : result_of(end_group());
}

ncclResult_t collective(int kind, const void *send, void *receive, size_t count, int dtype, int op, int root,
                        ncclComm_t handle, cudaStream_t stream) {
  Comm comm = find(handle);
  if (!comm || dtype < 0 || dtype > 9 || op < 0 || op > 4 || root < 0 || root >= comm->n) return refuse(ncclInvalidArgument);
  const bool reduces = kind != BROADCAST && kind != ALL_GATHER;
  if (reduces && !can_reduce(dtype)) return refuse(ncclInvalidArgument);
  if (comm->aborted) return refuse(ncclInvalidUsage);
  if (count == 0) return ncclSuccess;
  if (waits_for_itself(comm, NAMES[kind])) return ncclInvalidUsage;
  const Call call{kind, dtype, op, root, count};
  return later({comm, [=](int fault) {
    return enqueue_collective(comm, call, send, receive, fault, stream) ? ncclUnhandledCudaError : ncclSuccess;
  }, true});
}
}  // namespace

void count_received(int device, size_t bytes) {
  if (device < 64) received[device] += bytes;
}

// From now on, the group of collectives after `groups` others fails with a code of NCCL, for 100 has a wrong result, or for 101
// does not end before it is aborted.
API ncclResult_t ncclOnCpuFailAfter(long groups, int kind) {
  read_fault();
  fault = kind;
  groups_to_fault = groups;
  return ncclSuccess;
}

// Sets what a device has received from others so far, in bytes, but for reductions.
API ncclResult_t ncclOnCpuReceived(int device, size_t *bytes) {
  if (device < 0 || device >= 64) return ncclInvalidArgument;
  return *bytes = received[device], ncclSuccess;
}

API ncclResult_t ncclGetVersion(int *version) { return *version = 23203, ncclSuccess; }
API const char *ncclGetLastError(ncclComm_t) { return ""; }
API const char *ncclGetErrorString(ncclResult_t code) {
  static const char *const TEXTS[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                      "invalid argument", "invalid usage", "remote process exited", "in progress"};
  return code >= 0 && code < 8 ? TEXTS[code] : "unknown result code";
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static std::atomic<int> serial{0};
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/nccl-standin-%d-%d-%08x", getpid(), serial++, std::random_device{}());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t *out, int n, ncclUniqueId id, int rank) {
  int device = 0;
  if (n < 1 || n > MOST_RANKS || rank < 0 || rank >= n) return refuse(ncclInvalidArgument);
  if (cuInit(0)) return refuse(ncclUnhandledCudaError);
  if (cuCtxGetDevice(&device)) device = 0;
  const std::string clique = id.internal;
  Comm comm = join(clique, n, rank, device);
  if (!comm) return refuse(ncclSystemError);
  *out = comm.get();
  return later({comm, [comm](int) { return meet(comm); }, false});
}
API ncclResult_t ncclCommInitAll(ncclComm_t *out, int n, const int *list) {
  int count = 0;
  if (cuInit(0) || cuDeviceGetCount(&count)) return ncclUnhandledCudaError;
  if (n < 1 || n > MOST_RANKS) return ncclInvalidArgument;
  for (int i = 0; i < n; i++) {
    const int device = list ? list[i] : i;
    if (device < 0 || device >= count) return ncclInvalidArgument;
    for (int j = 0; j < i; j++)
      if (list && list[j] == device) return ncclInvalidUsage;
  }
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < n; i++) {
    Comm comm = join(id.internal, n, i, list ? list[i] : i);
    if (!comm) return ncclSystemError;
    out[i] = comm.get();
  }
  Comm first = find(out[0]);
  Current current(first->context);
  return result_of(meet(first));
}
API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  return result_of(leave(comm));
}
// What is under way ends at once; of a group, nothing is freed before its end.
API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  comm->aborted = true;
  if (!depth) return result_of(leave(comm));
  aborted.push_back(comm);
  return ncclSuccess;
}
// The failure of a device is CUDA's error, not NCCL's.
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  if (!find(comm)) return ncclInvalidArgument;
  return *error = ncclSuccess, ncclSuccess;
}

#define ASK(FUNCTION, FIELD) \
  API ncclResult_t FUNCTION(const ncclComm_t handle, int *out) { \
    Comm comm = find(handle); \
    return comm ? (*out = comm->FIELD, ncclSuccess) : ncclInvalidArgument; \
  }
ASK(ncclCommCount, n)
ASK(ncclCommUserRank, rank)
ASK(ncclCommCuDevice, device)

API ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
API ncclResult_t ncclGroupEnd() {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth) return ncclSuccess;
  return result_of(end_group());
}

API ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return collective(ALL_REDUCE, send, receive, count, type, op, 0, comm, stream);
}
API ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
  return collective(REDUCE_SCATTER, send, receive, count, type, op, 0, comm, stream);
}
API ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream) {
  return collective(ALL_GATHER, send, receive, count, type, 0, 0, comm, stream);
}
API ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  return collective(BROADCAST, send, receive, count, type, 0, root, comm, stream);
}
API ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {  // the one that libgpuarray calls
  return collective(BROADCAST, buffer, buffer, count, type, 0, root, comm, stream);
}
API ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t comm, cudaStream_t stream) {
  return collective(REDUCE, send, receive, count, type, op, root, comm, stream);
}
API ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return message(true, send, count, type, peer, comm, stream);
}
API ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return message(false, receive, count, type, peer, comm, stream);
}
