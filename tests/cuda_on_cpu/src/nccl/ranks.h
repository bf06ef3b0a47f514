// Communicators: the ranks of a clique, in one process or in several on this host, and the memory that they share.
#pragma once
#include "common.h"
#ifdef NCCL_HEADER
#include NCCL_HEADER  // NVIDIA's own: a declaration that differs is then an error of the compiler
#else
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef CUstream cudaStream_t;
enum {
  ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage
};
enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
#endif
#include <atomic>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <vector>

const int MISMATCH = 719, ILLEGAL_ADDRESS = 700;  // codes of the driver
const int WRONG_RESULT = 100, NEVER_ENDS = 101;  // kinds of faults of a group, besides the codes of NCCL
const int MOST_RANKS = 16;
const size_t PIECE = 256 << 10;  // bytes of a slot; each rank has two, used in turn: ranks meet once for each piece

enum Kind : int { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };

// A collective, as one rank has called it. The others have to make the same call.
struct Call {
  int kind, dtype, op, root;
  size_t count;
  bool operator==(const Call &other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && count == other.count;
  }
};

// A message to another rank, or from it.
struct Message {
  bool sends;
  int peer;
  char *address;
  size_t bytes;
};

// A piece of a message, from one rank to another.
struct Slot {
  std::atomic<uint64_t> filled, taken;  // how often
  size_t bytes;                         // of the whole message
  char content[64 << 10];
};

struct Shared {
  std::atomic<int> joined, connected;  // ranks
  struct {
    std::atomic<uint64_t> pieces;  // that the rank has put into its slots so far
    std::atomic<int> thread;       // that called for the rank outside of a group last
    char device[32];
    Call call[2];
  } ranks[MOST_RANKS];
  char slots[2][MOST_RANKS][PIECE];
  Slot pairs[MOST_RANKS][MOST_RANKS];  // by the rank that sends, and the one that receives
};

struct ncclComm {
  Shared *shared = nullptr;
  int n = 0, rank = 0, device = 0;
  void *context = nullptr;
  std::string clique;
  uint64_t pieces = 0;  // that are enqueued
  bool connected = false;
  unsigned long long memory = 0;  // of the device: an address
  std::atomic<int> calls{0};      // under way, which use the communicator
  std::atomic<bool> aborted{false}, left{false};
  ~ncclComm() {
    if (shared) munmap(shared, sizeof *shared);
  }
};

typedef std::shared_ptr<ncclComm> Comm;  // operations in flight hold it

// The communicator of a handle; a null pointer for one that never was. One that was destroyed or aborted ends the process.
Comm find(ncclComm_t handle);

// Ends a rank. The last one of its clique in this process frees the memory of all, and waits for their devices. A call
// that is still under way then ends the process.
int leave(const Comm &comm);

// Makes the communicator of a rank; a null pointer if that fails.
Comm join(const std::string &clique, int n, int rank, int device);

// Waits until all ranks have joined.
int meet(const Comm &comm);

// Connects ranks of this process before their first exchange: memory on each device, and a meeting with all other ranks.
int connect(const std::vector<Comm> &comms);

// On a worker: whether an exchange that all ranks have come to may end; else it waits until it is aborted.
void end_or_hang(const ncclComm &comm, bool hangs);

// While one lives, a context is current; then the one before is, or that of device 0, as after cudaSetDevice.
struct Current {
  explicit Current(void *context);
  ~Current();
};

// Enqueues this rank's part of a collective on a stream.
int enqueue_collective(const Comm &comm, const Call &call, const void *send, void *receive, int fault,
                       cudaStream_t stream);
// Enqueues the messages of a group for this rank on a stream.
int enqueue_messages(const Comm &comm, const std::vector<Message> &messages, int fault, cudaStream_t stream);
// Counts bytes that a device receives from others. Those of reductions depend on how NCCL does them.
void count_received(int device, size_t bytes);
bool can_reduce(int dtype);
size_t size_of(int dtype);
extern const char *const NAMES[];  // of the kinds
