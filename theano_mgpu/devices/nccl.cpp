// Exchanges between devices by NCCL: groups of copies and collectives, and a watch over those that are under way.
//
// Nothing here takes Python's lock, or a lock of libgpuarray. If a device fails, or a process ends, NCCL leaves the other
// devices waiting for ever, and threads that read from these hold such locks. So a thread of this library asks the
// devices, and aborts the communicators.
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

typedef std::chrono::steady_clock Clock;

// Functions of the CUDA driver and of NCCL, in the order in which nccl.py gives them.
struct Functions {
    int (*push_context)(void *);
    int (*pop_context)(void **);
    int (*copy)(uint64_t, uint64_t, size_t, void *);
    int (*create_event)(void **, unsigned);
    int (*record_event)(void *, void *);
    int (*query_event)(void *);
    int (*group_start)();
    int (*group_end)();
    int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
    int (*reduce)(const void *, void *, size_t, int, int, int, void *, void *);
    int (*broadcast)(const void *, void *, size_t, int, int, void *, void *);
    int (*send)(const void *, size_t, int, int, void *, void *);
    int (*receive)(void *, size_t, int, int, void *, void *);
    int (*async_error)(void *, int *);
    int (*abort)(void *);
};
Functions functions;
const int NOT_READY = 600, IN_PROGRESS = 7;  // codes of the driver, and of NCCL
const int MESSAGE = -2;                      // an op, as in nccl.py

enum State { IDLE, UNDER_WAY, FAILED };
enum Failure { BY_NCCL, BY_DEVICE, BY_TIMEOUT, BY_ANOTHER };  // as in nccl.py

struct Communicator {
    std::vector<void *> contexts, streams, events, comms;
    std::mutex mutex;       // of what follows
    State state = IDLE;
    bool recorded = false;  // the events are those of the latest exchange
    bool has_deadline = false;
    Clock::time_point deadline;
    int failure = 0, device = -1, code = 0;
};

// These are never freed: threads may use them until the process ends.
std::vector<Communicator *> &communicators = *new std::vector<Communicator *>;
std::mutex &registry = *new std::mutex;
std::condition_variable &something_under_way = *new std::condition_variable;
int n_watched = 0;  // exchanges that have begun since the watch has last looked
// The order on all devices has to be the same, for all communicators of the process.
std::timed_mutex &one_group = *new std::timed_mutex;

class Current {
public:
    explicit Current(void *context) { functions.push_context(context); }
    ~Current() { void *context; functions.pop_context(&context); }
};

// Lets all devices go on. What they then have is not the result of an exchange.
void abort_all() {
    std::lock_guard<std::mutex> lock(registry);
    for (size_t i = 0; i < communicators.size(); ++i) {
        Communicator &each = *communicators[i];
        std::lock_guard<std::mutex> own(each.mutex);
        if (each.state != FAILED) {
            each.state = FAILED;
            each.failure = BY_ANOTHER;
        }
        for (size_t j = 0; j < each.comms.size(); ++j)
            if (each.comms[j]) {
                Current current(each.contexts[j]);
                functions.abort(each.comms[j]);
                each.comms[j] = nullptr;
            }
    }
}

void fail(Communicator &communicator, int failure, int device, int code) {
    std::lock_guard<std::mutex> own(communicator.mutex);
    if (communicator.state == FAILED)
        return;
    communicator.state = FAILED;
    communicator.failure = failure;
    communicator.device = device;
    communicator.code = code;
}

// Gives the first device that has failed itself, and its error; -1 if none has. NCCL tells this as an error of its own.
int lost_device(const Communicator &communicator, int &code) {
    for (size_t i = 0; i < communicator.events.size(); ++i) {
        Current current(communicator.contexts[i]);
        const int result = functions.query_event(communicator.events[i]);
        if (result && result != NOT_READY) {
            code = result;
            return (int)i;
        }
    }
    return -1;
}

// Looks whether an exchange has ended; aborts all communicators if it has failed.
int poll(Communicator &communicator) {
    int failure = -1, device = -1, code = 0;
    {
        std::lock_guard<std::mutex> own(communicator.mutex);
        if (communicator.state != UNDER_WAY)
            return communicator.state;
        bool done = communicator.recorded;
        device = communicator.recorded ? lost_device(communicator, code) : -1;
        if (device >= 0)
            failure = BY_DEVICE;
        for (size_t i = 0; communicator.recorded && failure < 0 && i < communicator.events.size(); ++i) {
            Current current(communicator.contexts[i]);
            if (functions.query_event(communicator.events[i])) {  // not ready, or lost since: the next look tells
                done = false;
                int result = 0;
                if (!functions.async_error(communicator.comms[i], &result) && result && result != IN_PROGRESS)
                    failure = BY_NCCL, code = result;
            }
        }
        if (failure < 0 && done) {
            communicator.state = IDLE;
            return IDLE;
        }
        if (failure < 0 && communicator.has_deadline && Clock::now() > communicator.deadline)
            failure = BY_TIMEOUT;
        if (failure < 0)
            return UNDER_WAY;
    }
    fail(communicator, failure, device, code);
    // A thread within a group uses the communicators. One that hangs there is a reason to abort them.
    bool alone = one_group.try_lock_for(std::chrono::seconds(5));
    abort_all();
    if (alone)
        one_group.unlock();
    return FAILED;
}

// The thread that watches over exchanges that nobody waits for.
void watch() {
    for (;;) {
        std::vector<Communicator *> all;
        {
            std::unique_lock<std::mutex> lock(registry);
            something_under_way.wait(lock, [] { return n_watched > 0; });
            n_watched = 0;
            all = communicators;
        }
        for (bool any = true; any;) {
            usleep(20000);
            any = false;
            for (size_t i = 0; i < all.size(); ++i)
                any |= poll(*all[i]) == UNDER_WAY;
        }
    }
}

// The copies and collectives of an exchange; the addresses of each device follow those of the one before.
struct Exchange {
    int n_copies, n_collectives;
    const uint64_t *to, *from;       // of copies; 0 for a device that has none to make
    const size_t *bytes;             // of copies, the same on each device
    const uint64_t *send, *receive;  // of collectives
    // Of collectives, the same on each device. An op of -1 broadcasts from the root. A reduction without a root, which
    // is -1, goes to all devices. A message goes from its root to its target; the other addresses are 0.
    const size_t *counts;
    const int *dtypes, *ops, *roots, *targets;
};

// Enqueues collective j of device i.
int collective(Communicator &communicator, const Exchange &exchange, int i, int j) {
    const int k = i * exchange.n_collectives + j;
    const void *send = (const void *)exchange.send[k];
    void *receive = (void *)exchange.receive[k], *comm = communicator.comms[i], *stream = communicator.streams[i];
    const size_t count = exchange.counts[j];
    const int dtype = exchange.dtypes[j], op = exchange.ops[j], root = exchange.roots[j];
    if (op == MESSAGE && send)
        return functions.send(send, count, dtype, exchange.targets[j], comm, stream);
    if (op == MESSAGE)
        return receive ? functions.receive(receive, count, dtype, root, comm, stream) : 0;
    if (op < 0)
        return functions.broadcast(send, receive, count, dtype, root, comm, stream);
    if (root < 0)
        return functions.all_reduce(send, receive, count, dtype, op, comm, stream);
    return functions.reduce(send, receive, count, dtype, op, root, comm, stream);
}

// Enqueues an exchange on the streams. Gives the failure, or -1.
int enqueue(Communicator &communicator, const Exchange &exchange, int &device, int &code) {
    const int n = (int)communicator.comms.size();
    for (int i = 0; i < n; ++i) {
        Current current(communicator.contexts[i]);
        for (int j = 0; j < exchange.n_copies; ++j) {
            const int k = i * exchange.n_copies + j;
            if (!exchange.to[k])
                continue;
            code = functions.copy(exchange.to[k], exchange.from[k], exchange.bytes[j], communicator.streams[i]);
            if (code) {
                device = i;
                return BY_DEVICE;
            }
        }
    }
    {
        Current current(communicator.contexts[0]);  // without one, NCCL would make and leave one of device 0
        code = functions.group_start();
        for (int i = 0; i < n && !code; ++i)
            for (int j = 0; j < exchange.n_collectives && !code; ++j)
                code = collective(communicator, exchange, i, j);
        const int end = functions.group_end();  // also after an error: else the thread stays in the group
        code = code ? code : end;
    }
    if (code)
        return BY_NCCL;
    for (int i = 0; i < n; ++i) {
        Current current(communicator.contexts[i]);
        code = functions.record_event(communicator.events[i], communicator.streams[i]);
        if (code) {
            device = i;
            return BY_DEVICE;
        }
    }
    return -1;
}

}

extern "C" {

void mgpu_use(const Functions *given) { functions = *given; }

// Makes a communicator of NCCL's communicators; null if the driver makes no events.
Communicator *mgpu_open(int n, void *const *contexts, void *const *streams, void *const *comms) {
    Communicator *made = new Communicator;
    made->contexts.assign(contexts, contexts + n);
    made->streams.assign(streams, streams + n);
    made->comms.assign(comms, comms + n);
    made->events.resize(n);
    const unsigned DISABLE_TIMING = 2;
    for (int i = 0; i < n; ++i) {
        Current current(contexts[i]);
        if (functions.create_event(&made->events[i], DISABLE_TIMING)) {
            delete made;
            return nullptr;
        }
    }
    std::lock_guard<std::mutex> lock(registry);
    if (communicators.empty())
        std::thread(watch).detach();
    communicators.push_back(made);
    return made;
}

// Enqueues an exchange, without waiting for it. Gives the communicator's state. No timeout is 0 seconds.
int mgpu_exchange(Communicator *communicator, const Exchange *exchange, double timeout) {
    int device = -1, code = 0, failure;
    {
        std::lock_guard<std::timed_mutex> alone(one_group);
        {
            std::lock_guard<std::mutex> own(communicator->mutex);
            if (communicator->state == FAILED)
                return FAILED;
            communicator->state = UNDER_WAY;
            communicator->recorded = false;
            communicator->has_deadline = timeout > 0;
            communicator->deadline = Clock::now() + std::chrono::milliseconds((long long)(timeout * 1000));
        }
        {
            std::lock_guard<std::mutex> lock(registry);
            ++n_watched;
        }
        something_under_way.notify_one();
        failure = enqueue(*communicator, *exchange, device, code);
        if (failure == BY_NCCL && (device = lost_device(*communicator, code)) >= 0)
            failure = BY_DEVICE;
        if (failure < 0) {
            std::lock_guard<std::mutex> own(communicator->mutex);
            communicator->recorded = true;
            return communicator->state;
        }
        fail(*communicator, failure, device, code);
        abort_all();
    }
    return FAILED;
}

// Waits until the latest exchange has ended on all devices, for some time. Gives the communicator's state.
int mgpu_wait(Communicator *communicator, double seconds) {
    const Clock::time_point end = Clock::now() + std::chrono::microseconds((long long)(seconds * 1e6));
    for (int turn = 0;; ++turn) {
        const int state = poll(*communicator);
        if (state != UNDER_WAY || Clock::now() > end)
            return state;
        if (turn < 20)
            sched_yield();
        else
            usleep(turn < 500 ? 20 : 200);
    }
}

// Gives the failure: its kind, the device, and the code.
void mgpu_failure(Communicator *communicator, int *out) {
    std::lock_guard<std::mutex> own(communicator->mutex);
    out[0] = communicator->failure;
    out[1] = communicator->device;
    out[2] = communicator->code;
}

// Keep others from calls that may wait for all devices while an exchange is launched.
void mgpu_lock() { one_group.lock(); }
void mgpu_unlock() { one_group.unlock(); }

// Aborts all communicators, which then have failed.
void mgpu_give_up() {
    bool alone = one_group.try_lock_for(std::chrono::seconds(5));
    abort_all();
    if (alone)
        one_group.unlock();
}

}
