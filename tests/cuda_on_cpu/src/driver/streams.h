// Contexts, streams and events, and the workers that run what is queued.
#pragma once
#include "memory.h"

#include <atomic>
#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>

namespace standin {

struct Stream;
typedef std::shared_ptr<Stream> StreamRef;

// The end of a stream's first `sequence` operations. An event is a position that can be moved.
struct Position {
  StreamRef stream;
  uint64_t sequence = 0;
  bool reached() const;
  void wait() const;
};

struct Operation {
  std::function<int()> run;     // gives an error code; may be empty
  std::vector<Position> after;  // what it waits for, besides the operations before it in its stream
  const char *what;
};

// What is enqueued on a stream, and does not run: the content of a graph.
struct Capture {
  Capture(int mode) : mode(mode) {}
  const std::thread::id thread = std::this_thread::get_id();
  const int mode;  // whether calls that may wait are refused: 0 in all threads, 1 in its own, 2 nowhere
  std::vector<Operation> operations;
  std::atomic<int> refused{0};  // the error of the first call that no capture allows
};

// A queue, whose operations a thread runs in order.
struct Stream {
  Stream(CUctx_st *context, Device *device) : context(context), device(device) {}
  CUctx_st *const context;
  Device *const device;
  std::atomic<uint64_t> done{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable work, progress;
  std::deque<Operation> queue;
  std::shared_ptr<Capture> capture;  // takes the operations instead of `queue`, if it is not null
  bool stop = false;
  uint64_t queued = 0;     // operations so far
  uint64_t null_seen = 0;  // the latest operation of the NULL stream that this stream waits for
};

// A live handle starts with one of these; a stale one does not.
enum : uint32_t {
  LIVE_STREAM = 0x53545245, LIVE_EVENT = 0x45564e54, LIVE_MODULE = 0x4d4f4455, LIVE_CONTEXT = 0x43545854,
  LIVE_GRAPH = 0x47525048
};

// What the thread of a stream needs to run a kernel and to get out of a fault.
struct Worker {
  Stream *stream;
  std::mt19937 random;
  sigjmp_buf way_out;
  volatile sig_atomic_t guarded = 0;
  volatile int signal = 0;
  void *volatile address = nullptr;
};
extern thread_local Worker *worker;

// Calls `run` on a worker. A fault in it gives an error code.
int run_guarded(const char *what, const std::function<int()> &run);
void install_fault_handlers();

StreamRef make_stream(CUctx_st *context);

// Adds an operation to a stream, and gives its position. With CUDA_ON_CPU_SYNC=1, it waits for it if it may block.
Position enqueue(const StreamRef &stream, const char *what, std::function<int()> run, std::vector<Position> after = {},
                 bool may_block = true);

// The time that a call of a launch takes on the host, and its count.
void spend_launch(Device *device, CallKind kind);

std::shared_ptr<Capture> capture_of(const StreamRef &stream);
// Whether a call that may wait, or change the memory of a device, is refused, since a stream is captured. The captures
// are invalid then.
bool is_refused_in_capture();

// The stream of a handle; for the NULL stream, that of the context. A null pointer for a stale handle.
StreamRef stream_of(CUstream handle, CUctx_st *context);
inline bool is_null_stream(CUstream handle) { return (uintptr_t)handle <= 2; }  // the legacy one, and per-thread ones
Position last_position(const StreamRef &stream);

bool is_idle(CUctx_st *context);
void wait_until_idle(CUctx_st *context);

// Waits until the device of a context is idle, and so are all devices that have to do with it: its peers, and those that
// NCCL has connected. Nothing is enqueued on any device meanwhile. This is what a driver may do before it frees memory.
void wait_for_coupled(CUctx_st *context);

// The calling thread's stack of contexts.
extern thread_local std::vector<CUctx_st *> context_stack;
inline CUctx_st *current_context() { return context_stack.empty() ? nullptr : context_stack.back(); }

}  // namespace standin

struct CUstream_st {
  uint32_t tag = standin::LIVE_STREAM;
  standin::StreamRef stream;
  bool blocking = true;  // waits for the NULL stream, which waits for it
};

struct CUevent_st {
  uint32_t tag = standin::LIVE_EVENT;
  CUctx_st *context;
  std::mutex mutex;
  standin::Position position;
};

struct CUctx_st {
  uint32_t tag = standin::LIVE_CONTEXT;
  standin::Device *device;
  std::atomic<int> error{0};  // sticky

  std::mutex mutex;  // guards what follows, and the order of the operations of all streams
  std::vector<CUstream> streams;
  std::vector<standin::Position> destroyed;  // the ends of streams that are destroyed and may still run
  standin::StreamRef null_stream;
  uint64_t null_queued = 0;
};

typedef CUctx_st *CUcontext;
typedef CUevent_st *CUevent;

// For an API call: leaves it where the driver isn't initialised in this process.
namespace standin {
extern bool initialized, forked;
}
#define REQUIRE_INITIALIZED() \
  do { \
    if (standin::forked || !standin::initialized) return standin::NOT_INITIALIZED; \
  } while (0)

// Leaves an API call that may wait, or change the memory of a device, while a stream is captured.
#define REFUSE_IN_CAPTURE() \
  do { \
    if (standin::is_refused_in_capture()) return standin::CAPTURE_UNSUPPORTED; \
  } while (0)

// Also where no context is current, or the current one has failed. Declares `context`.
#define REQUIRE_CONTEXT() \
  REQUIRE_INITIALIZED(); \
  CUcontext context = standin::current_context(); \
  if (!context) return standin::INVALID_CONTEXT; \
  if (int sticky = context->error.load()) return sticky
