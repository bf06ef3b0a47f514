// The API of libcuda: graphs that are captured from a stream.
//
// What is enqueued on a stream while it is captured does not run. It becomes the graph, whose operations run one after
// the other at each launch, with the parameters of their capture. Memory is read and written when a launch runs, pageable
// memory, too. Calls that may wait or change memory are refused meanwhile (streams.h, `REFUSE_IN_CAPTURE`), and the
// capture is then invalid.
#include "streams.h"

#include <algorithm>
#include <chrono>

using namespace standin;

struct CUgraph_st {
  uint32_t tag = LIVE_GRAPH;
  CUcontext context;
  std::vector<Operation> operations;
};
// A graph that can be launched.
struct CUgraphExec_st {
  uint32_t tag = LIVE_GRAPH;
  CUcontext context;
  std::shared_ptr<const std::vector<Operation>> operations;  // also of launches that have not run
};
typedef CUgraph_st *CUgraph;
typedef CUgraphExec_st *CUgraphExec;

namespace standin {

// The captures that are under way. Calls on streams look there only while there is one.
static std::mutex &captures_mutex = *new std::mutex;
static std::vector<std::shared_ptr<Capture>> &captures = *new std::vector<std::shared_ptr<Capture>>;
static std::atomic<int> n_captures{0};

std::shared_ptr<Capture> capture_of(const StreamRef &stream) {
  if (!n_captures) return nullptr;
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->capture;
}

bool is_refused_in_capture() {
  if (!n_captures) return false;
  enum { GLOBAL, THREAD_LOCAL, RELAXED };
  bool refused = false;
  std::lock_guard<std::mutex> lock(captures_mutex);
  for (const auto &capture : captures) {
    if (capture->mode == RELAXED) continue;
    if (capture->mode == THREAD_LOCAL && capture->thread != std::this_thread::get_id()) continue;
    capture->refused = CAPTURE_UNSUPPORTED;
    refused = true;
  }
  return refused;
}

}  // namespace standin

API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  REQUIRE_CONTEXT();
  if (is_null_stream(handle)) return CAPTURE_UNSUPPORTED;
  if (handle->tag != LIVE_STREAM) return INVALID_HANDLE;
  if (mode < 0 || mode > 2) return INVALID_VALUE;
  auto capture = std::make_shared<Capture>(mode);
  std::scoped_lock lock(captures_mutex, handle->stream->mutex);
  if (handle->stream->capture) return INVALID_VALUE;
  handle->stream->capture = capture;
  captures.push_back(capture);
  n_captures++;
  return SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph *out) {
  REQUIRE_INITIALIZED();
  if (is_null_stream(handle) || handle->tag != LIVE_STREAM) return INVALID_HANDLE;
  *out = nullptr;
  std::scoped_lock lock(captures_mutex, handle->stream->mutex);
  auto capture = handle->stream->capture;
  if (!capture) return INVALID_VALUE;
  enum { RELAXED = 2 };
  if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  handle->stream->capture = nullptr;
  captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
  n_captures--;
  if (capture->refused) return CAPTURE_INVALIDATED;
  *out = new CUgraph_st;
  (*out)->context = handle->stream->context;
  (*out)->operations = std::move(capture->operations);
  return SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream handle, int *status) {
  REQUIRE_INITIALIZED();
  if (is_null_stream(handle) || handle->tag != LIVE_STREAM) return INVALID_HANDLE;
  auto capture = capture_of(handle->stream);
  *status = !capture ? 0 : capture->refused ? 2 : 1;  // none, invalid, active
  return SUCCESS;
}

// Gives the number of nodes; their handles are not made.
API CUresult cuGraphGetNodes(CUgraph graph, void *nodes, size_t *count) {
  REQUIRE_INITIALIZED();
  if (!graph || graph->tag != LIVE_GRAPH) return INVALID_HANDLE;
  if (nodes) return NOT_SUPPORTED;
  *count = graph->operations.size();
  return SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  REQUIRE_CONTEXT();
  if (!graph || graph->tag != LIVE_GRAPH) return INVALID_HANDLE;
  if (flags) return NOT_SUPPORTED;
  *out = new CUgraphExec_st;
  (*out)->context = graph->context;
  (*out)->operations = std::make_shared<const std::vector<Operation>>(graph->operations);
  return SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec graph, CUstream handle) {
  REQUIRE_CONTEXT();
  if (!graph || graph->tag != LIVE_GRAPH || graph->context != context) return INVALID_HANDLE;
  StreamRef stream = stream_of(handle, context);
  if (!stream || stream->context != context) return INVALID_HANDLE;
  auto operations = graph->operations;
  trace("graph dev%d %zu operations", context->device->ordinal, operations->size());
  spend_launch(stream->device, GRAPH_LAUNCHES);
  enqueue(stream, "cuGraphLaunch", [=] {
    for (const Operation &operation : *operations)
      if (int code = operation.run ? operation.run() : 0) return code;
    return 0;
  });
  return SUCCESS;
}

API CUresult cuGraphExecDestroy(CUgraphExec graph) {
  REQUIRE_INITIALIZED();
  if (!graph || graph->tag != LIVE_GRAPH) return INVALID_HANDLE;
  graph->tag = 0;
  graph->operations.reset();  // the handle is not freed, so that a later use of it is found
  return SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph graph) {
  REQUIRE_INITIALIZED();
  if (!graph || graph->tag != LIVE_GRAPH) return INVALID_HANDLE;
  graph->tag = 0;
  graph->operations.clear();
  return SUCCESS;
}
