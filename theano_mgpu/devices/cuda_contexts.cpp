#include <dlfcn.h>
#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>

namespace {

const size_t CONTEXT_WORDS = 232 / sizeof(unsigned);  // of libgpuarray's context

typedef int Dot(size_t, Array *, size_t, size_t, Array *, size_t, size_t, Array *, size_t);
template <typename T>
using Gemv = int(int, int, size_t, size_t, T, Array *, size_t, size_t, Array *, size_t, int, T, Array *, size_t, int);
template <typename T>
using Gemm = int(int, int, int, size_t, size_t, size_t, T, Array *, size_t, size_t, Array *, size_t, size_t, T,
                 Array *, size_t, size_t);
template <typename T>
using Ger = int(int, size_t, size_t, T, Array *, size_t, int, Array *, size_t, int, Array *, size_t, size_t);
template <typename T>
using GemmBatch = int(int, int, int, size_t, size_t, size_t, T, Array **, size_t *, size_t, Array **, size_t *, size_t,
                      T, Array **, size_t *, size_t, size_t);
template <typename T>
using GemvBatch = int(int, int, size_t, size_t, T, Array **, size_t *, size_t, Array **, size_t *, size_t, T, Array **,
                      size_t *, size_t, size_t, int);
template <typename T>
using GerBatch = int(int, size_t, size_t, T, Array **, size_t *, size_t, Array **, size_t *, size_t, Array **,
                     size_t *, size_t, size_t, int);
template <typename T>
using Gemm3D = int(int, int, int, size_t, size_t, size_t, T, Array *, size_t, size_t, ssize_t, Array *, size_t, size_t,
                   ssize_t, T, Array *, size_t, size_t, ssize_t, size_t);

struct BlasTable {
    int (*setup)(Context *);
    void (*teardown)(Context *);
    Dot *hdot, *sdot, *ddot;
    Gemv<float> *hgemv, *sgemv;
    Gemv<double> *dgemv;
    Gemm<float> *hgemm, *sgemm;
    Gemm<double> *dgemm;
    Ger<float> *hger, *sger;
    Ger<double> *dger;
    GemmBatch<float> *hgemmBatch, *sgemmBatch;
    GemmBatch<double> *dgemmBatch;
    GemvBatch<float> *hgemvBatch, *sgemvBatch;
    GemvBatch<double> *dgemvBatch;
    GerBatch<float> *hgerBatch, *sgerBatch;
    GerBatch<double> *dgerBatch;
    Gemm3D<float> *hgemm3D, *sgemm3D;
    Gemm3D<double> *dgemm3D;
};

struct CommTable {
    int (*create)(Comm **, Context *, void *, int, int);
    void (*destroy)(Comm *);
    int (*generate_clique_id)(Context *, void *);
    int (*get_count)(const Comm *, int *);
    int (*get_rank)(const Comm *, int *);
    int (*reduce)(Array *, size_t, Array *, size_t, size_t, int, int, int, Comm *);
    int (*all_reduce)(Array *, size_t, Array *, size_t, size_t, int, int, Comm *);
    int (*reduce_scatter)(Array *, size_t, Array *, size_t, size_t, int, int, Comm *);
    int (*broadcast)(Array *, size_t, size_t, int, int, Comm *);
    int (*all_gather)(Array *, size_t, Array *, size_t, size_t, int, Comm *);
};

// The contexts that are protected. They live as long as the process.
struct Protected {
    Context *context;
    const unsigned *entered;  // libgpuarray's count
    std::recursive_mutex alone;
    std::atomic<bool> is_captured;  // what is enqueued becomes a part of a CUDA graph
    std::thread::id captures;       // the thread that captures
};
const int MOST = 64;
Protected contexts[MOST];
int n_contexts = 0;
void (*enter)(Context *) = nullptr;  // libgpuarray's cuda_enter
void (*leave)(Context *) = nullptr;  // libgpuarray's cuda_exit
bool keeps_freed = true;  // libgpuarray keeps freed memory for later arrays
bool forked = false;  // a thread that is not in this process may have a lock; CUDA does not work here anyway

Protected *find(const Context *context) {
    for (int i = 0; i < n_contexts; ++i)
        if (contexts[i].context == context)
            return &contexts[i];
    return nullptr;
}

bool is_captured_by_another(const Protected *context) {
    return context->is_captured && context->captures != std::this_thread::get_id();
}

// Wait until another thread has captured a graph. That thread computes in Python: it needs the lock of the interpreter.
void wait_for_capture(const Protected *context) {
    static const auto has_lock = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static const auto let_go = (void *(*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static const auto take = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void *state = has_lock && has_lock() ? let_go() : nullptr;
    while (is_captured_by_another(context))
        usleep(50);
    if (state)
        take(state);
}

// While one lives, this thread is alone in the contexts of a call. They are left as they were entered.
class Visit {
    static const int MANY = 2;
    Protected *visited[MANY];
    unsigned before[MANY];
    int count;

    void add(Context *context) {
        Protected *found = context && !forked ? find(context) : nullptr;
        if (found && count < MANY && (count == 0 || visited[0] != found))
            visited[count++] = found;
    }
    void see(Context *context) { add(context); }
    void see(Array *array) { if (array) add(array->context); }
    void see(Array **arrays) { see(*arrays); }  // libgpuarray returns at once from an empty batch
    void see(Kernel *kernel) { if (kernel) add(kernel->context); }
    void see(const Comm *comm) { if (comm) add(comm->context); }
    // Lock all of them, and return null; or none, and return one that another thread captures.
    const Protected *locked() {
        const Protected *captured = nullptr;
        for (int i = 0; i < count; ++i) {
            visited[i]->alone.lock();
            if (is_captured_by_another(visited[i]))
                captured = visited[i];
        }
        for (int i = count - 1; captured && i >= 0; --i)
            visited[i]->alone.unlock();
        return captured;
    }
    template <typename T> void see(T) {}
    void see_all() {}
    template <typename T, typename... Rest> void see_all(T first, Rest... rest) { see(first); see_all(rest...); }

public:
    template <typename... Arguments> explicit Visit(Arguments... arguments) : count(0) {
        see_all(arguments...);
        if (count == 2 && visited[1] < visited[0])  // always in one order: two threads never wait for each other
            std::swap(visited[0], visited[1]);
        while (const Protected *captured = locked())
            wait_for_capture(captured);
        for (int i = 0; i < count; ++i)
            before[i] = *visited[i]->entered;
    }
    ~Visit() {
        for (int i = count - 1; i >= 0; --i) {
            while (*visited[i]->entered > before[i])
                leave(visited[i]->context);
            visited[i]->alone.unlock();
        }
    }
};

// The substitute for one function of a table.
template <typename Table, typename Function, Function *Table::*place> struct Guarded;
template <typename Table, typename Result, typename... Arguments, Result (*Table::*place)(Arguments...)>
struct Guarded<Table, Result(Arguments...), place> {
    static const Table *originals;
    static Result call(Arguments... arguments) {
        Visit visit(arguments...);
        return (originals->*place)(arguments...);
    }
    static void put(Table &table, const Table &original) {
        originals = &original;
        if (original.*place)
            table.*place = call;
    }
};
template <typename Table, typename Result, typename... Arguments, Result (*Table::*place)(Arguments...)>
const Table *Guarded<Table, Result(Arguments...), place>::originals;

// NCCL's lock, held between the launches of an exchange: null before NCCL is used.
void (*lock_group)() = nullptr, (*unlock_group)() = nullptr;

// While one lives, no exchange is launched. Calls that free memory may wait for all devices. One of these would wait for
// an exchange that is launched on some devices only, and keep it from being launched on the others.
class BetweenExchanges {
    void (*unlock)();

public:
    explicit BetweenExchanges(bool frees = true) : unlock(frees ? unlock_group : nullptr) { if (unlock) lock_group(); }
    ~BetweenExchanges() { if (unlock) unlock(); }
};

BufferTable buffer;
BlasTable blas;
CommTable comm;
const BufferTable *original_buffer = nullptr;
const BlasTable *original_blas = nullptr;
const CommTable *original_comm = nullptr;

int transfer(Array *to, size_t to_offset, Array *from, size_t from_offset, size_t size) {
    Visit visit(to, from);
    if (int error = original_buffer->sync(from))
        return error;
    return original_buffer->transfer(to, to_offset, from, from_offset, size);
}

// libgpuarray calls cuMemFree without entering the context, and ignores the error.
void release(Array *array) {
    Visit visit(array);
    if (!forked)
        enter(array->context);  // `visit` leaves it
    BetweenExchanges apart(!keeps_freed);
    original_buffer->release(array);
}

void kernel_release(Kernel *kernel) {
    Visit visit(kernel);
    BetweenExchanges apart;
    original_buffer->kernel_release(kernel);
}

#define GUARD(TABLE, TYPE, NAME) \
    Guarded<TYPE, std::remove_pointer<decltype(TYPE::NAME)>::type, &TYPE::NAME>::put(TABLE, *original_##TABLE)
#define GUARD_BUFFER(NAME) GUARD(buffer, BufferTable, NAME)
#define GUARD_BLAS(NAME) GUARD(blas, BlasTable, NAME)
#define GUARD_BLAS_TYPES(NAME) GUARD_BLAS(h##NAME); GUARD_BLAS(s##NAME); GUARD_BLAS(d##NAME)
#define GUARD_COMM(NAME) GUARD(comm, CommTable, NAME)

void fill_tables() {
    buffer = *original_buffer;
    GUARD_BUFFER(deinit); GUARD_BUFFER(alloc); GUARD_BUFFER(retain); GUARD_BUFFER(release); GUARD_BUFFER(share);
    GUARD_BUFFER(move); GUARD_BUFFER(read); GUARD_BUFFER(write); GUARD_BUFFER(memset); GUARD_BUFFER(kernel_alloc);
    GUARD_BUFFER(kernel_retain); GUARD_BUFFER(kernel_setarg); GUARD_BUFFER(kernel_call);
    GUARD_BUFFER(sync); GUARD_BUFFER(property);
    buffer.transfer = transfer;
    buffer.kernel_release = kernel_release;
    blas = *original_blas;
    GUARD_BLAS(setup); GUARD_BLAS(teardown);
    GUARD_BLAS_TYPES(dot); GUARD_BLAS_TYPES(gemv); GUARD_BLAS_TYPES(gemm); GUARD_BLAS_TYPES(ger);
    GUARD_BLAS_TYPES(gemmBatch); GUARD_BLAS_TYPES(gemvBatch); GUARD_BLAS_TYPES(gerBatch); GUARD_BLAS_TYPES(gemm3D);
    comm = *original_comm;
    GUARD_COMM(create); GUARD_COMM(destroy); GUARD_COMM(generate_clique_id); GUARD_COMM(reduce);
    GUARD_COMM(all_reduce); GUARD_COMM(reduce_scatter); GUARD_COMM(broadcast); GUARD_COMM(all_gather);
}

// Whether each word of a table is a function of the library that `one` is in, or empty.
bool functions_of_one_library(const void *table, size_t bytes, const void *one) {
    Dl_info library, found;
    dladdr(one, &library);
    for (size_t i = 0; i < bytes / sizeof(void *); ++i) {
        const void *function = ((void *const *)table)[i];
        if (function && (!dladdr(function, &found) || found.dli_fbase != library.dli_fbase))
            return false;
    }
    return true;
}

// libgpuarray's count in a context: the one word that entering it changes.
const unsigned *count_of(Context *context) {
    unsigned before[CONTEXT_WORDS], inside[CONTEXT_WORDS];
    std::memcpy(before, context, sizeof before);
    enter(context);
    std::memcpy(inside, context, sizeof inside);
    leave(context);
    int place = -1;
    for (size_t i = 0; i < CONTEXT_WORDS; ++i)
        if (inside[i] != before[i]) {
            if (place >= 0 || inside[i] != before[i] + 1)
                return nullptr;
            place = (int)i;
        }
    return place < 0 ? nullptr : (const unsigned *)context + place;
}

}

// Returns how often libgpuarray has entered a context and not left it; -1 where its count was not found.
extern "C" int entries(Context *context, void (*cuda_enter)(Context *), void (*cuda_exit)(Context *)) {
    if (Protected *found = find(context)) {  // other threads may use it: to look for the count would see their changes
        std::lock_guard<std::recursive_mutex> alone(found->alone);
        return (int)*found->entered;
    }
    enter = cuda_enter;
    leave = cuda_exit;
    const unsigned *count = count_of(context);
    return count ? (int)*count : -1;
}

// Protect a context; returns why not, or null.
extern "C" const char *protect(Context *context, void (*cuda_enter)(Context *), void (*cuda_exit)(Context *)) {
    if (find(context))
        return nullptr;
    if (n_contexts == MOST)
        return "too many contexts are open (64)";
    enter = cuda_enter;
    leave = cuda_exit;
    const unsigned *count = count_of(context);
    if (!count)
        return "its count of entries into a context was not found";
    if (!original_buffer) {
        if (!functions_of_one_library(context->buffer, sizeof(BufferTable), (void *)enter) ||
            !functions_of_one_library(context->blas, sizeof(BlasTable), (void *)enter) ||
            !functions_of_one_library(context->comm, sizeof(CommTable), (void *)enter))
            return "its tables of functions are not those of 0.7";
        original_buffer = context->buffer;
        original_blas = context->blas;
        original_comm = context->comm;
        fill_tables();
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
    }
    if (context->buffer != original_buffer || context->blas != original_blas || context->comm != original_comm)
        return "its contexts have different tables of functions";
    while (*count)
        leave(context);
    contexts[n_contexts].context = context;
    contexts[n_contexts].entered = count;
    ++n_contexts;
    context->buffer = &buffer;
    context->blas = &blas;
    context->comm = &comm;
    return nullptr;
}

// Free memory within its context, in all contexts that are protected.
extern "C" void free_within_context(int keeps) {
    buffer.release = release;
    keeps_freed = keeps;
}

// Keep what may wait for all devices apart from exchanges by NCCL, which hold a lock. Call it before the first one.
extern "C" void keep_apart(void (*lock)(), void (*unlock)()) {
    lock_group = lock;
    unlock_group = unlock;
}

// Page-locked memory, by the driver's functions; they give its code.
extern "C" int allocate_host(int (*allocate)(void **, size_t), void **address, size_t size) {
    BetweenExchanges apart;
    return allocate(address, size);
}

extern "C" int free_host(int (*free)(void *), void *address) {
    BetweenExchanges apart;
    return free(address);
}

// Call a function of the driver for a context's stream, and give its code, while no other thread captures the stream. A
// function with two arguments passes over the third.
extern "C" int on_stream(Context *context, int (*function)(void *, void *, unsigned), void *first, void *second) {
    Visit visit(context);
    return function(first, second, 0);
}

// Begin, or end, to capture a context's stream in this thread: other threads wait before they enqueue anything there.
extern "C" void set_captured(Context *context, int is_captured) {
    Protected *found = find(context);
    std::lock_guard<std::recursive_mutex> alone(found->alone);
    found->captures = std::this_thread::get_id();
    found->is_captured = is_captured;
}
