// The API of libcuda: streams and events.
#include "streams.h"

#include <algorithm>

using namespace standin;

API CUresult cuStreamCreate(CUstream *out, unsigned flags) {
  REQUIRE_CONTEXT();
  const unsigned NON_BLOCKING = 1;
  CUstream handle = new CUstream_st;
  handle->stream = make_stream(context);
  handle->blocking = !(flags & NON_BLOCKING);
  std::lock_guard<std::mutex> lock(context->mutex);
  context->streams.push_back(handle);
  *out = handle;
  return SUCCESS;
}

API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int) { return cuStreamCreate(out, flags); }

// What is queued still runs. The handle is not freed, so that a later use of it is found.
API CUresult cuStreamDestroy_v2(CUstream handle) {
  REQUIRE_INITIALIZED();
  if (is_null_stream(handle) || handle->tag != LIVE_STREAM) return INVALID_HANDLE;
  StreamRef stream = handle->stream;
  CUcontext context = stream->context;
  {
    std::lock_guard<std::mutex> lock(context->mutex);
    auto &streams = context->streams;
    streams.erase(std::remove(streams.begin(), streams.end(), handle), streams.end());
    context->destroyed.push_back(last_position(stream));
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->stop = true;
  stream->work.notify_one();
  handle->tag = 0;
  handle->stream.reset();
  return SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream handle) {
  REQUIRE_INITIALIZED();
  if (is_null_stream(handle)) {
    CUcontext context = current_context();
    if (!context) return INVALID_CONTEXT;
    wait_until_idle(context);
    return context->error;
  }
  if (handle->tag != LIVE_STREAM) return INVALID_HANDLE;
  StreamRef stream = handle->stream;
  if (auto capture = capture_of(stream)) {
    capture->refused = CAPTURE_UNSUPPORTED;
    return CAPTURE_UNSUPPORTED;
  }
  REFUSE_IN_CAPTURE();
  last_position(stream).wait();
  return stream->context->error;
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  REQUIRE_INITIALIZED();
  if (!event || event->tag != LIVE_EVENT) return INVALID_HANDLE;
  StreamRef stream = stream_of(handle, current_context());
  if (!stream) return is_null_stream(handle) ? INVALID_CONTEXT : INVALID_HANDLE;
  if (int sticky = stream->context->error.load()) return sticky;
  Position position;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    position = event->position;
  }
  if (position.stream != stream && !position.reached()) enqueue(stream, "cuStreamWaitEvent", nullptr, {position});
  return SUCCESS;
}

API CUresult cuEventCreate(CUevent *out, unsigned) {
  REQUIRE_CONTEXT();
  *out = new CUevent_st;
  (*out)->context = context;
  return SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
  REQUIRE_INITIALIZED();
  if (!event || event->tag != LIVE_EVENT) return INVALID_HANDLE;
  event->tag = 0;
  delete event;
  return SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream handle) {
  REQUIRE_CONTEXT();
  if (!event || event->tag != LIVE_EVENT) return INVALID_HANDLE;
  Position position;
  if (is_null_stream(handle)) {
    if (event->context != context) return INVALID_HANDLE;
    // An operation of the NULL stream waits for all others; without any, the event has been reached already.
    if (!is_idle(context)) position = enqueue(stream_of(handle, context), "cuEventRecord", nullptr);
  } else {
    if (handle->tag != LIVE_STREAM || handle->stream->context != event->context) return INVALID_HANDLE;
    if (auto capture = capture_of(handle->stream)) {  // an event of a capture orders its streams, and there is one
      capture->refused = CAPTURE_UNSUPPORTED;
      return CAPTURE_UNSUPPORTED;
    }
    position = last_position(handle->stream);
  }
  std::lock_guard<std::mutex> lock(event->mutex);
  event->position = position;
  return SUCCESS;
}

API CUresult cuEventQuery(CUevent event) {
  REQUIRE_INITIALIZED();
  REFUSE_IN_CAPTURE();
  if (!event || event->tag != LIVE_EVENT) return INVALID_HANDLE;
  if (int sticky = event->context->error.load()) return sticky;  // also of an event that has not been reached
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->position.reached() ? event->context->error.load() : (int)NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event) {
  REQUIRE_INITIALIZED();
  REFUSE_IN_CAPTURE();
  if (!event || event->tag != LIVE_EVENT) return INVALID_HANDLE;
  Position position;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    position = event->position;
  }
  position.wait();
  return event->context->error;
}
