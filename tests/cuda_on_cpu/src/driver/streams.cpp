// Streams: queues, their order, and the thread of each of them.
//
// A call that starts something adds an operation to a queue and returns, so that whatever is not ordered by a stream,
// an event or a synchronisation runs in any order, as on a GPU. The NULL stream is the legacy one: it waits for all
// blocking streams of its context, and they for it.
#include "streams.h"

#include <algorithm>
#include <pthread.h>
#include <shared_mutex>
#include <thread>
#include <unistd.h>

namespace standin {

thread_local std::vector<CUcontext> context_stack;
thread_local Worker *worker = nullptr;

bool Position::reached() const { return !stream || stream->done.load(std::memory_order_acquire) >= sequence; }

void Position::wait() const {
  if (reached()) return;
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->progress.wait(lock, [this] { return reached(); });
}

// Runs one operation, unless the context has failed. The first error stays.
static void perform(Stream *stream, const Operation &operation) {
  CUcontext context = stream->context;
  if (!operation.run || context->error.load()) return;
  stream->device->allow_all();
  int result = operation.run(), none = 0;
  if (result && context->error.compare_exchange_strong(none, result))
    say("device %d: %s failed with error %d: every later call on the device fails", stream->device->ordinal,
        operation.what, result);
}

static double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// The thread of a stream.
static void work(StreamRef stream) {
  static std::atomic<unsigned> workers{0};
  Worker self;
  self.stream = stream.get();
  const size_t device = (size_t)stream->device->physical;
  const double slowdown = device < settings.slowness.size() ? settings.slowness[device] - 1 : 0;
  double owed = 0;  // seconds by which a slow device is ahead of its speed
  self.random.seed(settings.seed * 7919u + workers++);
  worker = &self;
  // A fault may come while the stack pointer is in a fibre's stack, or wrong.
  std::vector<char> signal_stack(64 * 1024);
  stack_t alternate = {};
  alternate.ss_sp = signal_stack.data();
  alternate.ss_size = signal_stack.size();
  sigaltstack(&alternate, nullptr);
  // Other signals are for the program's threads.
  sigset_t blocked;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
  for (;;) {
    Operation operation;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->work.wait(lock, [&] { return stream->stop || !stream->queue.empty(); });
      if (stream->queue.empty()) break;
      operation = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    for (const Position &position : operation.after) position.wait();
    if (settings.delay_us > 0) usleep(self.random() % (unsigned)settings.delay_us);
    const double began = seconds(CLOCK_THREAD_CPUTIME_ID);
    perform(stream.get(), operation);
    owed += (seconds(CLOCK_THREAD_CPUTIME_ID) - began) * slowdown;
    if (owed > 2e-4) {
      const double slept = seconds(CLOCK_MONOTONIC);
      usleep((unsigned)(owed * 1e6));
      owed -= seconds(CLOCK_MONOTONIC) - slept;  // it sleeps longer than it was asked to
    }
    operation = Operation();  // frees what it holds before anyone sees that it is done
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->done.fetch_add(1, std::memory_order_release);
    stream->progress.notify_all();
  }
  worker = nullptr;
  alternate.ss_flags = SS_DISABLE;
  sigaltstack(&alternate, nullptr);
}

StreamRef make_stream(CUcontext context) {
  auto stream = std::make_shared<Stream>(context, context->device);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // until the worker has set its own
  std::thread(work, stream).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return stream;
}

StreamRef stream_of(CUstream handle, CUcontext context) {
  if (!is_null_stream(handle)) return handle->tag == LIVE_STREAM ? handle->stream : nullptr;
  if (!context) return nullptr;
  std::lock_guard<std::mutex> lock(context->mutex);
  if (!context->null_stream) context->null_stream = make_stream(context);
  return context->null_stream;
}

Position last_position(const StreamRef &stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return Position{stream, stream->queued};
}

// The driver's lock: held while it frees memory, shared while something is enqueued.
static std::shared_mutex &gate = *new std::shared_mutex;

Position enqueue(const StreamRef &stream, const char *what, std::function<int()> run, std::vector<Position> after,
                 bool may_block) {
  if (auto capture = capture_of(stream)) {
    if (!after.empty()) capture->refused = CAPTURE_ISOLATION;
    capture->operations.push_back(Operation{std::move(run), {}, what});
    return Position{};
  }
  CUcontext context = stream->context;
  Position position{stream, 0};
  {
    std::shared_lock<std::shared_mutex> open(gate);
    std::lock_guard<std::mutex> order(context->mutex);
    const bool is_null = stream == context->null_stream;
    if (is_null) {
      for (CUstream other : context->streams)
        if (other->blocking) after.push_back(last_position(other->stream));
    } else if (stream->null_seen < context->null_queued) {
      after.push_back(Position{context->null_stream, context->null_queued});
      stream->null_seen = context->null_queued;
    }
    after.erase(std::remove_if(after.begin(), after.end(), [](const Position &p) { return p.reached(); }), after.end());
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->queue.push_back(Operation{std::move(run), std::move(after), what});
    position.sequence = ++stream->queued;
    if (is_null) context->null_queued = position.sequence;
    stream->work.notify_one();
  }
  if (settings.synchronous && may_block) position.wait();
  return position;
}

// The ends of all queues of a context.
static std::vector<Position> ends(CUcontext context) {
  std::lock_guard<std::mutex> order(context->mutex);
  std::vector<Position> result;
  for (CUstream handle : context->streams) result.push_back(last_position(handle->stream));
  if (context->null_stream) result.push_back(last_position(context->null_stream));
  auto &old = context->destroyed;
  old.erase(std::remove_if(old.begin(), old.end(), [](const Position &p) { return p.reached(); }), old.end());
  result.insert(result.end(), old.begin(), old.end());
  return result;
}

bool is_idle(CUcontext context) {
  for (const Position &position : ends(context))
    if (!position.reached()) return false;
  return true;
}

void wait_until_idle(CUcontext context) {
  for (const Position &position : ends(context)) position.wait();
}

void wait_for_coupled(CUcontext context) {
  if (!settings.strict_free) return wait_until_idle(context);
  std::lock_guard<std::shared_mutex> closed(gate);
  Device *own = context->device;
  for (Device *other : devices) {
    const bool coupled = own->has_peer(other) || other->has_peer(own) || (own->is_connected && other->is_connected);
    if ((other == own || coupled) && other->primary) wait_until_idle(other->primary);
  }
}

}  // namespace standin
