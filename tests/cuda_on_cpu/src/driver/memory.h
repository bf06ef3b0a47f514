// Devices and their memory.
#pragma once
#include "settings.h"

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

struct CUctx_st;

namespace standin {

const size_t PAGE = 4096;

inline size_t round_up(size_t number, size_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// An allocation: the bytes that were asked for, and those of its pages with the guard page.
struct Block {
  size_t bytes, span;
};

// Kinds of calls that are counted. driver.py has the same order, in `Calls`.
enum CallKind { LAUNCHES, COLLECTIVES, GRAPH_LAUNCHES, TO_DEVICE, TO_HOST, ON_DEVICE, BETWEEN_DEVICES, CALL_KINDS };

// Counts down to a fault. It may be set while the program runs.
class Countdown {
 public:
  void start(long count, int code);  // a negative count cancels
  int next();                        // the code of the fault where the count has run out, else 0

 private:
  std::mutex mutex;
  long left = -1;
  int code = 0;
};

struct Device {
  int ordinal;   // among the visible devices
  int physical;  // among all devices
  size_t limit;  // bytes that can be allocated
  int capability_major, capability_minor, multiprocessors;
  Countdown launch_fault, allocation_fault;
  std::atomic<unsigned long> calls[CALL_KINDS] = {};

  std::atomic<uint64_t> peers{0};       // the devices whose memory this one can touch, as bits
  std::atomic<bool> is_connected{false};  // by NCCL

  // The primary context. init_mutex guards it.
  CUctx_st *primary = nullptr;
  int retained = 0;
  unsigned flags = 0;

  std::mutex mutex;  // guards what follows
  char *base = nullptr;
  size_t next = 0, used = 0, peak = 0;
  int protection_key = -1;
  std::map<char *, Block> blocks;  // by the start of their pages

  CUresult allocate(size_t bytes, CUdeviceptr *out);
  CUresult release(const char *address);
  void release_all();
  bool contains(const void *address, size_t bytes);   // in one block
  bool reachable(const void *address, size_t bytes);  // in one block, also of a peer, or in pinned memory
  void allow(bool access) const;                      // by the calling thread
  void allow_all() const;                             // the device's memory and that of its peers
  bool has_peer(const Device *other) const { return peers >> other->ordinal & 1; }

 private:
  bool reserve();
  char *find_room(size_t span);
  std::map<char *, Block>::iterator find(const char *address);
  void close(char *start, size_t span);
};

// Never destroyed, as workers may run until the process has ended.
extern std::vector<Device *> &devices;

// The device whose range of addresses has this one, or a null pointer.
Device *owner(const void *address);

// Memory of the host that devices can read and write.
void *allocate_pinned(size_t bytes);
bool release_pinned(void *address);
bool is_pinned(const void *address, size_t bytes);

}  // namespace standin
