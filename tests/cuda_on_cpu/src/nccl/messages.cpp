// Messages from one rank to another: those of a group, for one rank, are one operation on the rank's stream.
//
// All of them go on at the same time, so that ranks can send to each other. Each pair of ranks has a slot in the shared
// memory for each direction, and messages of a pair are received in the order in which they are sent. A message has been
// sent when it is received: NCCL may keep small ones, but nobody can rely on this.
#include "nccl/ranks.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace {
struct MessageTask {
  Comm comm;
  std::vector<Message> messages;
  int fault;  // that of the group
};

// The messages that a rank sends to another one, or that it receives from it, and how far they are.
struct Way {
  bool sends;
  Slot *slot;
  std::vector<const Message *> messages;
  size_t next = 0, at = 0;  // a message, and the bytes of it that have been copied

  bool is_done() const { return next == messages.size() && (!sends || slot->taken == slot->filled); }

  // Copies the next piece, if the other side is ready. Gives whether it was; a message of another size is an error.
  bool step(int &error) {
    const uint64_t filled = slot->filled.load(std::memory_order_acquire);
    if (next == messages.size() || (slot->taken.load(std::memory_order_acquire) == filled) != sends) return false;
    const Message &message = *messages[next];
    const size_t length = std::min(sizeof slot->content, message.bytes - at);
    if (sends) {
      slot->bytes = message.bytes;
      memcpy(slot->content, message.address + at, length);
      slot->filled.store(filled + 1, std::memory_order_release);
    } else if (slot->bytes != message.bytes) {
      standin::say("ncclRecv: %zu bytes from rank %d, which sends %zu", message.bytes, message.peer, slot->bytes);
      error = MISMATCH;
      return false;
    } else {
      memcpy(message.address + at, slot->content, length);
      slot->taken.store(filled, std::memory_order_release);
    }
    at += length;
    if (at == message.bytes) next++, at = 0;
    return true;
  }
};

// On the worker of the rank's stream.
int run_messages(void *data) {
  MessageTask &task = *(MessageTask *)data;
  ncclComm &comm = *task.comm;
  std::vector<Way> ways;
  for (int peer = 0; peer < comm.n; peer++)
    for (bool sends : {true, false}) {
      Way way{sends, sends ? &comm.shared->pairs[comm.rank][peer] : &comm.shared->pairs[peer][comm.rank], {}};
      for (auto &message : task.messages)
        if (message.peer == peer && message.sends == sends) way.messages.push_back(&message);
      ways.push_back(way);
    }
  for (auto &message : task.messages)
    if (!standin_reachable(message.address, message.bytes)) {
      standin::say("%s: rank %d: %p is not memory of device %d", message.sends ? "ncclSend" : "ncclRecv", comm.rank,
                   (void *)message.address, comm.device);
      return ILLEGAL_ADDRESS;
    }
  for (int idle = 0;; idle++) {
    int error = 0;
    bool done = true;
    for (auto &way : ways) {
      if (comm.aborted) return 0;
      while (way.step(error)) idle = 0;
      if (error) return error;
      done &= way.is_done();
    }
    if (done) break;
    if (idle > 100) usleep(20);
  }
  end_or_hang(comm, task.fault == NEVER_ENDS);
  if (task.fault == WRONG_RESULT)
    for (auto &message : task.messages)
      if (!message.sends) message.address[message.bytes - 1] ^= 0x55;  // the exponent of the last number
  return 0;
}
}  // namespace

int enqueue_messages(const Comm &comm, const std::vector<Message> &messages, int fault, cudaStream_t stream) {
  for (auto &message : messages)
    if (!message.sends && message.peer != comm->rank) count_received(comm->device, message.bytes);
  auto *task = new MessageTask{comm, messages, fault};
  Current current(comm->context);
  return standin_enqueue_collective((CUstream)stream, run_messages, task, [](void *data) { delete (MessageTask *)data; },
                                    "ncclSend and ncclRecv");
}
