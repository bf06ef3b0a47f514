// Exchanges between devices by NCCL: groups of copies and collectives, and a watch over those that are under way.
//
// Each device has a stream for NCCL. What an exchange reads is computed before on the device's computing stream, which
// waits for the exchange where its results are read.
//
// Nothing here takes Python's lock, or a lock of libgpuarray. If a device fails, or a process ends, NCCL leaves the other
// devices waiting for ever, and threads that read from these hold such locks. So a thread of this library asks the
// devices. It alone aborts communicators, without a lock: an abort may take long, or for ever.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
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
    int (*wait_event)(void *, void *, unsigned);
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

enum State { IDLE, UNDER_WAY, FAILING, FAILED };     // as in nccl.py; a failed one has been aborted
enum Failure { BY_NCCL, BY_DEVICE, BY_TIMEOUT, BY_ANOTHER };  // as in nccl.py

typedef std::vector<void *> Handles;  // one for each device
const int RING = 8;  // exchanges whose ends have events of their own

struct Communicator {
    Handles contexts, computing, streams, begins, ends[RING];  // contexts; streams; events
    std::mutex mutex;       // of what follows
    Handles comms;          // none once they are aborted
    State state = IDLE;
    int number = -1;        // of the latest exchange
    bool recorded = false;  // the events are those of the latest exchange
    bool has_deadline = false;
    Clock::time_point deadline;
    int failure = 0, device = -1, code = 0;
};

// These are never freed: threads may use them until the process ends.
std::vector<Communicator *> &communicators = *new std::vector<Communicator *>;
std::mutex &registry = *new std::mutex;
std::condition_variable &something_to_do = *new std::condition_variable;
int n_watched = 0;  // exchanges that have begun since the watch has last looked
bool any_failing = false;  // and no abort has begun since
// The order on all devices has to be the same, for all communicators of the process.
std::timed_mutex &one_group = *new std::timed_mutex;

class Current {
public:
    explicit Current(void *context) { functions.push_context(context); }
    ~Current() { void *context; functions.pop_context(&context); }
};

// The communicators of NCCL that a process has of one clique.
struct Ranks {
    Handles contexts, comms;
};

// Aborts the last rank of each clique, or the others, or both. In a group, none frees memory, which waits for its device,
// before all devices have been told to go on.
void abort_ranks(const std::vector<Ranks> &all, bool others, bool last) {
    if (all.empty())
        return;
    functions.group_start();
    for (size_t i = 0; i < all.size(); ++i)
        for (size_t j = 0; j < all[i].comms.size(); ++j)
            if (j + 1 < all[i].comms.size() ? others : last) {
                Current current(all[i].contexts[j]);
                functions.abort(all[i].comms[j]);
            }
    Current current(all[0].contexts[0]);
    functions.group_end();
}

// Lets all devices go on. What they then have is not the result of an exchange. Called by the watch alone.
void abort_all() {
    std::vector<Ranks> all;
    std::vector<Communicator *> failing;
    {
        std::lock_guard<std::mutex> lock(registry);
        any_failing = false;
        for (size_t i = 0; i < communicators.size(); ++i) {
            Communicator &each = *communicators[i];
            std::lock_guard<std::mutex> own(each.mutex);
            if (each.state < FAILING)
                each.failure = BY_ANOTHER;
            if (each.state != FAILED)
                failing.push_back(&each);
            each.state = std::max(each.state, FAILING);  // no further call uses the communicator
            if (!each.comms.empty())
                all.push_back({each.contexts, std::move(each.comms)});
            each.comms.clear();
        }
    }
    // At the last abort NCCL frees what the ranks of a process have. A call that waits for another process, and would
    // use that, ends at the first abort. A thread that stays in a call for another reason is not waited for.
    const std::chrono::seconds patience(5);
    bool alone = one_group.try_lock_for(patience);
    const bool all_at_once = alone;
    if (!alone) {
        abort_ranks(all, true, false);
        alone = one_group.try_lock_for(patience);
    }
    if (alone)
        one_group.unlock();
    abort_ranks(all, all_at_once, true);
    for (size_t i = 0; i < failing.size(); ++i) {
        std::lock_guard<std::mutex> own(failing[i]->mutex);
        failing[i]->state = FAILED;
    }
}

// Has the watch abort all communicators.
void fail(Communicator &communicator, int failure, int device, int code) {
    {
        std::lock_guard<std::mutex> own(communicator.mutex);
        if (communicator.state >= FAILING)
            return;
        communicator.state = FAILING;
        communicator.failure = failure;
        communicator.device = device;
        communicator.code = code;
    }
    std::lock_guard<std::mutex> lock(registry);
    any_failing = true;
    something_to_do.notify_one();
}

// Gives the first device that has failed itself, and its error; -1 if none has. NCCL tells this as an error of its own.
int lost_device(const Communicator &communicator, int &code) {
    for (size_t i = 0; i < communicator.contexts.size(); ++i) {
        Current current(communicator.contexts[i]);
        const int result = functions.query_event(communicator.begins[i]);
        if (result && result != NOT_READY) {
            code = result;
            return (int)i;
        }
    }
    return -1;
}

// Looks whether the latest exchange has ended, or has failed.
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
        const Handles &ends = communicator.ends[communicator.number % RING];
        for (size_t i = 0; communicator.recorded && failure < 0 && i < ends.size(); ++i) {
            Current current(communicator.contexts[i]);
            if (functions.query_event(ends[i])) {  // not ready, or lost since: the next look tells
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
    return FAILING;
}

// The thread that aborts, and watches over exchanges that nobody waits for.
void watch() {
    std::unique_lock<std::mutex> lock(registry);
    for (bool any_under_way = false;;) {
        if (any_under_way)
            something_to_do.wait_for(lock, std::chrono::milliseconds(20), [] { return any_failing; });
        else
            something_to_do.wait(lock, [] { return any_failing || n_watched > 0; });
        n_watched = 0;
        const std::vector<Communicator *> all = communicators;
        const bool aborts = any_failing;
        lock.unlock();
        any_under_way = false;
        for (size_t i = 0; i < all.size(); ++i)
            any_under_way |= poll(*all[i]) == UNDER_WAY;
        if (aborts)
            abort_all();
        lock.lock();
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
int collective(const Exchange &exchange, int i, int j, void *comm, void *stream) {
    const int k = i * exchange.n_collectives + j;
    const void *send = (const void *)exchange.send[k];
    void *receive = (void *)exchange.receive[k];
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

// Records what a stream of each device has to do so far, and has other streams wait for it, if there are any; goes on after
// an error. Gives the first failure, or -1.
int follow(const Communicator &communicator, const Handles &before, const Handles &events, const Handles *after, int &device,
           int &code) {
    int failure = -1;
    for (size_t i = 0; i < events.size(); ++i) {
        Current current(communicator.contexts[i]);
        int result = functions.record_event(events[i], before[i]);
        if (!result && after)
            result = functions.wait_event((*after)[i], events[i], 0);
        if (result && failure < 0)
            failure = BY_DEVICE, device = (int)i, code = result;
    }
    return failure;
}

// Enqueues an exchange on the streams. Gives the failure, or -1.
int enqueue(const Communicator &communicator, const Handles &comms, const Exchange &exchange, int &device, int &code) {
    const int n = (int)comms.size();
    const int failure = follow(communicator, communicator.computing, communicator.begins, &communicator.streams, device,
                               code);
    if (failure >= 0)
        return failure;
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
                code = collective(exchange, i, j, comms[i], communicator.streams[i]);
        const int end = functions.group_end();  // also after an error: else the thread stays in the group
        code = code ? code : end;
    }
    return code ? BY_NCCL : -1;
}

}

extern "C" {

void mgpu_use(const Functions *given) { functions = *given; }

// Makes a communicator of NCCL's communicators; null if the driver makes no events.
Communicator *mgpu_open(int n, void *const *contexts, void *const *computing, void *const *streams, void *const *comms) {
    Communicator *made = new Communicator;
    made->contexts.assign(contexts, contexts + n);
    made->computing.assign(computing, computing + n);
    made->streams.assign(streams, streams + n);
    made->comms.assign(comms, comms + n);
    const unsigned DISABLE_TIMING = 2;
    for (int k = 0; k <= RING; ++k) {
        Handles &events = k < RING ? made->ends[k] : made->begins;
        events.resize(n);
        for (int i = 0; i < n; ++i) {
            Current current(contexts[i]);
            if (functions.create_event(&events[i], DISABLE_TIMING)) {
                delete made;
                return nullptr;
            }
        }
    }
    std::lock_guard<std::mutex> lock(registry);
    if (communicators.empty())
        std::thread(watch).detach();
    communicators.push_back(made);
    return made;
}

// Enqueues an exchange, without waiting for it. Gives the communicator's state. No timeout is 0 seconds. The computing
// streams wait for the exchange, unless its number is asked for: then its memory has to live until `mgpu_join`.
int mgpu_exchange(Communicator *communicator, const Exchange *exchange, double timeout, int *number) {
    int device = -1, code = 0, failure;
    {
        std::lock_guard<std::timed_mutex> alone(one_group);
        Handles comms;
        int own_number;
        {
            std::lock_guard<std::mutex> own(communicator->mutex);
            if (communicator->state >= FAILING)
                return communicator->state;
            comms = communicator->comms;
            communicator->state = UNDER_WAY;
            communicator->recorded = false;
            communicator->has_deadline = timeout > 0;
            communicator->deadline = Clock::now() + std::chrono::milliseconds((long long)(timeout * 1000));
            own_number = communicator->number = (communicator->number + 1) & 0xffff;
        }
        {
            std::lock_guard<std::mutex> lock(registry);
            ++n_watched;
        }
        something_to_do.notify_one();
        failure = enqueue(*communicator, comms, *exchange, device, code);
        if (failure == BY_NCCL && (device = lost_device(*communicator, code)) >= 0)
            failure = BY_DEVICE;
        // After an error, too: what is under way may still read and write the memory.
        const Handles *after = failure < 0 && number ? nullptr : &communicator->computing;
        int other, other_code, ended = follow(*communicator, communicator->streams,
                                              communicator->ends[own_number % RING], after, other, other_code);
        if (failure < 0 && ended >= 0)
            failure = ended, device = other, code = other_code;
        if (failure < 0) {
            if (number)
                *number = own_number;
            std::lock_guard<std::mutex> own(communicator->mutex);
            communicator->recorded = true;
            return communicator->state;
        }
    }
    fail(*communicator, failure, device, code);
    return FAILING;
}

// Has the computing streams wait for an exchange, or for all of them, which is -1. Gives whether the driver does so.
int mgpu_join(Communicator *communicator, int number) {
    int device = -1, code = 0;
    for (int k = 0; k < (number < 0 ? RING : 1); ++k)
        for (size_t i = 0; i < communicator->contexts.size(); ++i) {
            Current current(communicator->contexts[i]);
            const int result = functions.wait_event(communicator->computing[i],
                                                    communicator->ends[(number < 0 ? k : number) % RING][i], 0);
            if (result && !code)
                device = (int)i, code = result;
        }
    if (code)
        fail(*communicator, BY_DEVICE, device, code);
    return !code;
}

// Waits until the latest exchange has ended on all devices, or has been aborted, for some time. Gives the
// communicator's state.
int mgpu_wait(Communicator *communicator, double seconds) {
    const Clock::time_point end = Clock::now() + std::chrono::microseconds((long long)(seconds * 1e6));
    for (int turn = 0;; ++turn) {
        const int state = poll(*communicator);
        if ((state != UNDER_WAY && state != FAILING) || Clock::now() > end)
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

// Has the watch abort all communicators, as after a failure.
void mgpu_give_up() {
    std::vector<Communicator *> all;
    {
        std::lock_guard<std::mutex> lock(registry);
        all = communicators;
    }
    for (size_t i = 0; i < all.size(); ++i)
        fail(*all[i], BY_ANOTHER, -1, 0);
}

}
