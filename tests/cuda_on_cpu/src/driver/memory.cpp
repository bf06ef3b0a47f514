// Devices and their memory.
//
// A device has a range of 256 GiB of addresses. An allocation ends at a page that nobody may touch, and freed addresses
// are not used again before the whole range has been, so that an access after the end, or after the free, is a fault.
// The pages of a device have a protection key (a feature of the processor and of Linux, called PKU): only threads that
// called Device::allow may touch them, which are the workers of the device's streams.
#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace standin {

static const size_t RANGE = (size_t)256 << 30;
static char *const FIRST_ADDRESS = (char *)0x100000000000ull;  // far from where Linux puts libraries and heaps
static const size_t GRANULE = 512;                             // cuMemAlloc rounds up to it
static const size_t POISON_LIMIT = (size_t)64 << 20;           // filling more would take too long

std::vector<Device *> &devices = *new std::vector<Device *>;

void Countdown::start(long count, int fault) {
  std::lock_guard<std::mutex> lock(mutex);
  left = count;
  code = fault;
}

int Countdown::next() {
  std::lock_guard<std::mutex> lock(mutex);
  if (left < 0) return 0;
  if (left == 0) return code;
  left--;
  return 0;
}

void Device::allow(bool access) const {
  if (protection_key > 0) pkey_set(protection_key, access ? 0 : PKEY_DISABLE_ACCESS);
}

void Device::allow_all() const {
  for (Device *other : devices) other->allow(other == this || has_peer(other));
}

// Takes the device's range of addresses, and a protection key for it.
bool Device::reserve() {
  if (base) return true;
  char *hint = FIRST_ADDRESS + (size_t)ordinal * RANGE;
  void *range = mmap(hint, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    say("device %d: cannot reserve 256 GiB of addresses: %s (is there a limit, as by ulimit -v?)", ordinal,
        strerror(errno));
    return false;
  }
  base = (char *)range;
  if (!settings.protection_keys) return true;
  protection_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
  static std::atomic<bool> reported{false};
  if (protection_key <= 0 && !reported.exchange(true))
    say("device %d has no protection key (%s): kernels can touch other devices' memory, and the host a device's, "
        "undetected", ordinal, errno == ENOSPC ? "none is left, or the processor has none" : strerror(errno));
  return true;
}

// A gap of `span` bytes, searched from the end of the latest allocation on, and then from the start.
char *Device::find_room(size_t span) {
  for (int attempt = 0; attempt < 2; attempt++) {
    size_t at = next;
    while (at + span <= RANGE) {
      auto after = blocks.lower_bound(base + at);
      size_t taken = 0;  // the end of a block in the way
      if (after != blocks.begin()) {
        auto before = std::prev(after);
        size_t end = before->first + before->second.span - base;
        if (end > at) taken = end;
      }
      if (!taken && after != blocks.end() && after->first < base + at + span)
        taken = after->first + after->second.span - base;
      if (!taken) return base + at;
      at = taken;
    }
    next = 0;
  }
  return nullptr;
}

CUresult Device::allocate(size_t bytes, CUdeviceptr *out) {
  if (allocation_fault.next()) return OUT_OF_MEMORY;
  std::lock_guard<std::mutex> lock(mutex);
  if (bytes > limit || used + round_up(bytes, GRANULE) > limit || !reserve()) return OUT_OF_MEMORY;
  // The array lies at the end of its pages, but for its alignment, so that the guard page follows it.
  const size_t padded = round_up(bytes, 256), open = round_up(padded, PAGE), span = open + (settings.guard ? PAGE : 0);
  char *start = find_room(span);
  if (!start) return OUT_OF_MEMORY;
  const int access = PROT_READ | PROT_WRITE;
  int failed = protection_key > 0 ? pkey_mprotect(start, open, access, protection_key) : mprotect(start, open, access);
  if (failed) {
    say("device %d: cannot map an allocation: %s (too many of them for sysctl vm.max_map_count?)", ordinal,
        strerror(errno));
    return OUT_OF_MEMORY;
  }
  next = start + span - base;
  blocks[start] = Block{bytes, span};
  used += round_up(bytes, GRANULE);
  peak = std::max(peak, used);
  char *address = start + (settings.guard ? open - padded : 0);
  if (settings.poison && padded <= POISON_LIMIT) {
    allow(true);
    memset(address, 0xff, padded);  // NaN, in all types of floats
    allow(false);
  }
  *out = (CUdeviceptr)address;
  return SUCCESS;
}

std::map<char *, Block>::iterator Device::find(const char *address) {
  auto after = blocks.upper_bound((char *)address);
  if (after == blocks.begin()) return blocks.end();
  auto block = std::prev(after);
  return address < block->first + block->second.span ? block : blocks.end();
}

// Without access again, as all that lies around: a mapping of its own would stay, of which Linux allows 65,530.
void Device::close(char *start, size_t span) {
  mmap(start, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

CUresult Device::release(const char *address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto block = find(address);
  if (block == blocks.end()) return INVALID_VALUE;
  close(block->first, block->second.span);
  used -= round_up(block->second.bytes, GRANULE);
  blocks.erase(block);
  return SUCCESS;
}

void Device::release_all() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto &block : blocks) close(block.first, block.second.span);
  blocks.clear();
  used = 0;
}

bool Device::contains(const void *address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto block = find((const char *)address);
  if (block == blocks.end()) return false;
  return (const char *)address + bytes <= block->first + block->second.span - (settings.guard ? PAGE : 0);
}

bool Device::reachable(const void *address, size_t bytes) {
  if (contains(address, bytes) || is_pinned(address, bytes)) return true;
  Device *other = owner(address);
  return other && other != this && has_peer(other) && other->contains(address, bytes);
}

Device *owner(const void *address) {
  for (Device *device : devices)
    if (device->base && (char *)address >= device->base && (char *)address < device->base + RANGE) return device;
  return nullptr;
}

static std::mutex &pinned_mutex = *new std::mutex;
static std::map<const char *, size_t> &pinned = *new std::map<const char *, size_t>;

void *allocate_pinned(size_t bytes) {
  bytes = round_up(bytes, PAGE);
  void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[(char *)address] = bytes;
  return address;
}

bool release_pinned(void *address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto entry = pinned.find((char *)address);
  if (entry == pinned.end()) return false;
  munmap(address, entry->second);
  pinned.erase(entry);
  return true;
}

bool is_pinned(const void *address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound((const char *)address);
  if (after == pinned.begin()) return false;
  auto entry = std::prev(after);
  return (const char *)address + bytes <= entry->first + entry->second;
}

}  // namespace standin
