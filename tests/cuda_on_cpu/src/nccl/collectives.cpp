// Collectives: a rank's part is one operation on the rank's stream.
//
// Ranks meet in shared memory. A worker touches the memory of its own device only: it copies a piece to the shared
// memory, waits until all ranks have done so, and reads their pieces.
#include "nccl/ranks.h"
#include "cublas/half.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <vector>

const char *const NAMES[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter"};

namespace {
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // bytes of each dtype

struct Task {
  Comm comm;
  Call call;
  const char *send;
  char *receive;
  uint64_t first;  // piece
  int fault;       // that of the group
};

typedef std::vector<const char *> Sources;  // one for each rank

template <class T> T combined(int op, T a, T b) {
  switch (op) {
  case ncclProd: return (T)(a * b);
  case ncclMax: return a != a || b > a ? b : a;  // NaN is passed over, as by NVIDIA's
  case ncclMin: return a != a || b < a ? b : a;
  default: return (T)(a + b);
  }
}

template <class T> void reduce(int op, const Sources &sources, char *target, size_t count) {
  for (size_t i = 0; i < count; i++) {
    T total = ((const T *)sources[0])[i];
    for (size_t rank = 1; rank < sources.size(); rank++) total = combined(op, total, ((const T *)sources[rank])[i]);
    ((T *)target)[i] = op == ncclAvg ? (T)(total / sources.size()) : total;
  }
}

// In half precision: rounded after each rank.
void reduce_half(int op, const Sources &sources, char *target, size_t count) {
  for (size_t i = 0; i < count; i++) {
    float total = half_to_float(((const uint16_t *)sources[0])[i]);
    for (size_t rank = 1; rank < sources.size(); rank++)
      total = half_to_float(float_to_half(combined(op, total, half_to_float(((const uint16_t *)sources[rank])[i]))));
    ((uint16_t *)target)[i] = float_to_half(op == ncclAvg ? total / sources.size() : total);
  }
}

typedef void Reduce(int, const Sources &, char *, size_t);
Reduce *const REDUCE_OF[] = {reduce<int8_t>, reduce<uint8_t>, reduce<int32_t>, reduce<uint32_t>, reduce<int64_t>,
                             reduce<uint64_t>, reduce_half, reduce<float>, reduce<double>, nullptr};

// Elements of a piece: all parts of a reduce-scatter are in one slot.
size_t step_of(const Call &call, int n) {
  return PIECE / (call.kind == REDUCE_SCATTER ? n : 1) / SIZES[call.dtype] / 16 * 16;
}

bool wait_for(const ncclComm &comm, int rank, uint64_t pieces) {
  for (int spins = 0; comm.shared->ranks[rank].pieces.load(std::memory_order_acquire) < pieces; spins++) {
    if (comm.aborted) return false;
    if (spins > 100) usleep(20);
  }
  return true;
}

// Whether the memory is that of the worker's device.
bool reachable(const Task &task) {
  const Call &call = task.call;
  const size_t bytes = call.count * SIZES[call.dtype], of_all = bytes * task.comm->n;
  const bool sends = call.kind != BROADCAST || task.comm->rank == call.root;
  const bool receives = call.kind != REDUCE || task.comm->rank == call.root;
  if ((!sends || standin_reachable(task.send, call.kind == REDUCE_SCATTER ? of_all : bytes)) &&
      (!receives || standin_reachable(task.receive, call.kind == ALL_GATHER ? of_all : bytes)))
    return true;
  standin::say("%s: rank %d: %p or %p is not memory of device %d", NAMES[call.kind], task.comm->rank,
               (const void *)task.send, (void *)task.receive, task.comm->device);
  return false;
}

// Bytes that each device sends to others in a ring.
double bytes_sent(const Call &call, int n) {
  const double bytes = (double)(call.count * SIZES[call.dtype]);
  return call.kind == ALL_REDUCE ? bytes * 2 * (n - 1) / n : call.kind == BROADCAST || call.kind == REDUCE ? bytes :
         bytes * (n - 1);
}

// On the worker of the rank's stream.
int run(void *data) {
  Task &task = *(Task *)data;
  ncclComm &comm = *task.comm;
  const Call &call = task.call;
  const int n = comm.n, rank = comm.rank;
  const size_t size = SIZES[call.dtype], count = call.count, step = step_of(call, n);
  const int parts = call.kind == REDUCE_SCATTER ? n : 1;
  if (!reachable(task)) return ILLEGAL_ADDRESS;
  auto &ranks = comm.shared->ranks;
  // An aborted rank has to leave its slots as they are: the others may still read them.
  if (comm.aborted) return 0;
  if (!wait_for(comm, rank, task.first)) return 0;  // collectives of a communicator are in order, also on two streams
  static const char *const rate = getenv("CUDA_ON_CPU_NCCL_RATE");  // bytes a microsecond
  std::chrono::steady_clock::time_point end;
  uint64_t piece = task.first;
  for (size_t at = 0; at < count; at += step, piece++) {
    const size_t length = std::min(step, count - at);
    auto &slots = comm.shared->slots[piece % 2];
    if (call.kind != BROADCAST || rank == call.root)
      for (int part = 0; part < parts; part++)
        memcpy(slots[rank] + part * step * size, task.send + (part * count + at) * size, length * size);
    ranks[rank].call[piece % 2] = call;
    ranks[rank].pieces.store(piece + 1, std::memory_order_release);
    Sources sources(n);
    for (int other = 0; other < n; other++) {
      if (!wait_for(comm, other, piece + 1)) return 0;
      sources[other] = slots[other] + (parts > 1 ? rank * step * size : 0);
      if (ranks[other].call[piece % 2] == call) continue;
      standin::say("%s: ranks %d and %d make different calls", NAMES[call.kind], rank, other);
      return MISMATCH;
    }
    if (at == 0 && rate && atof(rate) > 0)  // all have come
      end = std::chrono::steady_clock::now() +
            std::chrono::nanoseconds((long long)(1000 * bytes_sent(call, n) / atof(rate)));
    if (call.kind == REDUCE && rank != call.root) continue;
    char *to = task.receive + at * size;
    if (call.kind == BROADCAST) memcpy(to, sources[call.root], length * size);
    else if (call.kind == ALL_GATHER)
      for (int other = 0; other < n; other++) memcpy(to + other * count * size, sources[other], length * size);
    else REDUCE_OF[call.dtype](call.op, sources, to, length);
  }
  std::this_thread::sleep_until(end);
  end_or_hang(comm, task.fault == NEVER_ENDS);
  const bool in_place = call.kind == BROADCAST && rank == call.root && task.receive == task.send;  // writes nothing
  if (task.fault == WRONG_RESULT && !in_place) task.receive[count * size - 1] ^= 0x55;  // the exponent of the last number
  return 0;
}
}  // namespace

bool can_reduce(int dtype) { return REDUCE_OF[dtype]; }
size_t size_of(int dtype) { return SIZES[dtype]; }

int enqueue_collective(const Comm &comm, const Call &call, const void *send, void *receive, int fault,
                       cudaStream_t stream) {
  const size_t step = step_of(call, comm->n);
  auto *task = new Task{comm, call, (const char *)send, (char *)receive, comm->pieces, fault};
  comm->pieces += (call.count + step - 1) / step;
  if (call.kind == BROADCAST && comm->rank != call.root) count_received(comm->device, call.count * SIZES[call.dtype]);
  if (call.kind == ALL_GATHER) count_received(comm->device, (comm->n - 1) * call.count * SIZES[call.dtype]);
  Current current(comm->context);
  return standin_enqueue_collective((CUstream)stream, run, task, [](void *data) { delete (Task *)data; },
                                    NAMES[call.kind]);
}
