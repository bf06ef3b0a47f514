// The memory of calls that become CUDA graphs; see cuda_graphs.py.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

const size_t UNIT = 256;  // bytes; cuBLAS and cuDNN are fastest with such addresses
const int INITIALISED = 1, ERRORS = 8, BUFFER_REFERENCES = 513, REFUSED = 9;  // libgpuarray's numbers
enum Mode { OFF, COMPUTED, CAPTURED };

size_t rounded(size_t size) { return (size + UNIT - 1) / UNIT * UNIT; }

// A piece of a block, which libgpuarray has allocated.
struct Piece { size_t size; Array *block; };
// An array in a piece.
struct Used { uintptr_t address; Piece piece; unsigned references; };

struct Arena {
    Context *context = nullptr;
    Array *(*make)(Context *, size_t, size_t) = nullptr;  // libgpuarray's cuda_make_buf
    std::atomic<int> mode{OFF};
    std::thread::id thread;                  // the one that computes or captures
    std::mutex mutex;                        // guards what follows: any thread may free an array
    std::map<uintptr_t, Piece> free;         // by address
    std::unordered_map<Array *, Used> used;
    std::vector<Array *> blocks;
    char *staging = nullptr;                 // page-locked memory, for what is copied to the device
    size_t room = 0, staged = 0;             // bytes of it, and those that this call has taken
    const char *why = nullptr;               // why the call cannot be a graph
    bool finds_errors = false;               // the call reads whether a kernel has found an index out of bounds

    bool is_mine() const { return mode != OFF && thread == std::this_thread::get_id(); }
    bool captures() const { return mode == CAPTURED && thread == std::this_thread::get_id(); }

    // The smallest free piece that is large enough; what is left of it stays free.
    bool take(size_t size, Used *taken) {
        auto best = free.end();
        for (auto each = free.begin(); each != free.end(); ++each)
            if (each->second.size >= size && (best == free.end() || each->second.size < best->second.size))
                best = each;
        if (best == free.end())
            return false;
        const Piece piece = best->second;
        *taken = Used{best->first, Piece{size, piece.block}, 1};
        free.erase(best);
        if (piece.size > size)
            free[taken->address + size] = Piece{piece.size - size, piece.block};
        return true;
    }

    void give(uintptr_t address, Piece piece) {
        if (std::find(blocks.begin(), blocks.end(), piece.block) == blocks.end())
            return;  // the block was given back
        auto next = free.lower_bound(address);
        if (next != free.end() && next->second.block == piece.block && address + piece.size == next->first) {
            piece.size += next->second.size;
            next = free.erase(next);
        }
        if (next != free.begin()) {
            auto before = std::prev(next);
            if (before->second.block == piece.block && before->first + before->second.size == address) {
                before->second.size += piece.size;
                return;
            }
        }
        free[address] = piece;
    }

    char *stage(const void *source, size_t size) {
        char *at = staging + staged;
        staged += rounded(size);
        if (mode == COMPUTED)
            return nullptr;
        if (staged > room) {
            why = "it copies more to the device than before";
            return nullptr;
        }
        std::memcpy(at, source, size);
        return at;
    }

    // Give all blocks back to libgpuarray, which keeps a block as long as an array lies there.
    void give_back(void (*release)(Array *)) {
        std::vector<Array *> given;
        {
            std::lock_guard<std::mutex> lock(mutex);
            free.clear();
            given.swap(blocks);
        }
        for (Array *block : given)
            release(block);
    }
};

const int MOST = 64;  // as many as cuda_contexts.cpp protects
Arena arenas[MOST];
int n_arenas = 0;
BufferTable table;
const BufferTable *lower = nullptr;  // the functions of cuda_contexts.cpp
int (*drop_graphs)(Context *) = nullptr;  // of Python; says whether there were any

Arena *find(const Context *context) {
    for (int i = 0; i < n_arenas; ++i)
        if (arenas[i].context == context)
            return &arenas[i];
    return nullptr;
}

int write(Array *array, size_t offset, const void *source, size_t size) {
    Arena *arena = find(array->context);
    if (!arena->is_mine() || !size)
        return lower->write(array, offset, source, size);
    const char *staged = arena->stage(source, size);
    if (arena->captures() && !staged)
        return REFUSED;
    return lower->write(array, offset, staged ? staged : source, size);
}

Array *alloc(Context *context, size_t size, void *data, int flags) {
    Arena *arena = find(context);
    if (!arena->is_mine()) {
        Array *array = lower->alloc(context, size, data, flags);
        if (array || !drop_graphs(context))
            return array;
        arena->give_back(lower->release);
        return lower->alloc(context, size, data, flags);
    }
    const size_t bytes = rounded(size ? size : 1);
    Used taken;
    {
        std::lock_guard<std::mutex> lock(arena->mutex);
        if (!arena->take(bytes, &taken)) {
            if (arena->mode == CAPTURED) {
                arena->why = "it needs more memory than before";
                return nullptr;
            }
            Array *block = lower->alloc(context, bytes, nullptr, flags & ~INITIALISED);
            if (!block)
                return nullptr;
            arena->blocks.push_back(block);
            taken = Used{(uintptr_t)block->address, Piece{bytes, block}, 1};
        }
    }
    Array *array = arena->make(context, taken.address, size ? size : 1);
    {
        std::lock_guard<std::mutex> lock(arena->mutex);
        if (!array) {
            arena->give(taken.address, taken.piece);
            return nullptr;
        }
        arena->used[array] = taken;
        lower->retain(taken.piece.block);
    }
    if ((flags & INITIALISED) && write(array, 0, data, size)) {
        table.release(array);
        return nullptr;
    }
    return array;
}

// A copy of what is used of an array; `references` is 0 if it lies in no arena.
Used counted(Array *array, int more) {
    Arena *arena = find(array->context);
    std::lock_guard<std::mutex> lock(arena->mutex);
    auto found = arena->used.empty() ? arena->used.end() : arena->used.find(array);
    if (found == arena->used.end())
        return Used{0, Piece{0, nullptr}, 0};
    found->second.references += more;
    const Used used = found->second;
    if (!used.references) {
        arena->used.erase(found);
        arena->give(used.address, used.piece);
    }
    return used;
}

void retain(Array *array) {
    counted(array, 1);
    lower->retain(array);
}

void release(Array *array) {
    const Used used = counted(array, -1);
    lower->release(array);
    if (used.piece.block && !used.references)
        lower->release(used.piece.block);
}

int refuse(Context *context, const char *why) {
    find(context)->why = why;
    return REFUSED;
}

// The word in which kernels note an index out of bounds: libgpuarray has it in page-locked memory.
Array *errors_of(Context *context) {
    Array *errors = nullptr;
    lower->property(context, nullptr, nullptr, ERRORS, &errors);
    return errors;
}

int read(void *to, Array *from, size_t offset, size_t size) {
    Arena *arena = find(from->context);
    if (!arena->captures())
        return lower->read(to, from, offset, size);
    if (from != errors_of(from->context))
        return refuse(from->context, "it reads a value from the device");
    arena->finds_errors = true;
    std::memset(to, 0, size);
    return 0;
}

int sync(Array *array) {
    return find(array->context)->captures() ? refuse(array->context, "it waits for the device") : lower->sync(array);
}

int transfer(Array *to, size_t to_offset, Array *from, size_t from_offset, size_t size) {
    for (Context *context : {to->context, from->context}) {
        Arena *arena = find(context);
        if (arena && arena->captures())
            return refuse(context, "it copies a value from another device");
    }
    return lower->transfer(to, to_offset, from, from_offset, size);
}

}

// Give a context an arena; `make` is libgpuarray's cuda_make_buf, and `drop` frees graphs where memory is short. Return
// 0 if there are too many.
extern "C" int add_arena(Context *context, Array *(*make)(Context *, size_t, size_t), int (*drop)(Context *)) {
    drop_graphs = drop;
    if (find(context))
        return 1;
    if (n_arenas == MOST)
        return 0;
    if (!lower) {
        lower = context->buffer;
        table = *lower;
        table.alloc = alloc; table.retain = retain; table.release = release; table.write = write;
        table.read = read; table.sync = sync; table.transfer = transfer;
    }
    arenas[n_arenas].context = context;
    arenas[n_arenas].make = make;
    ++n_arenas;
    context->buffer = &table;
    return 1;
}

// Begin a call of this thread, whose arrays lie in the arena.
extern "C" void begin(Context *context, int mode, char *staging, size_t room) {
    Arena *arena = find(context);
    arena->thread = std::this_thread::get_id();
    arena->staged = 0;
    arena->finds_errors = false;
    arena->staging = staging;
    arena->room = room;
    arena->why = nullptr;
    arena->mode = mode;
}

// End the call; return why it cannot be a graph, or null.
extern "C" const char *end(Context *context) {
    find(context)->mode = OFF;
    return find(context)->why;
}

// The bytes of page-locked memory that the call takes for copies, so far.
extern "C" size_t staged(Context *context) { return find(context)->staged; }

// Whether launches of the graph have to look for an index out of bounds.
extern "C" int finds_errors(Context *context) { return find(context)->finds_errors; }

// Return whether kernels that have run found an index out of bounds, and forget it.
extern "C" int take_error(Context *context) {
    int *error = (int *)errors_of(context)->address, found = *error;
    *error = 0;
    return found;
}

// The number of arrays in the arena.
extern "C" size_t n_used(Context *context) {
    Arena *arena = find(context);
    std::lock_guard<std::mutex> lock(arena->mutex);
    return arena->used.size();
}

// Say of each array whether it has one reference: 1, or 0.
extern "C" void find_free(Array *const *arrays, size_t n, char *are_free) {
    for (size_t i = 0; i < n; ++i) {
        unsigned references = 0;
        lower->property(arrays[i]->context, arrays[i], nullptr, BUFFER_REFERENCES, &references);
        are_free[i] = references == 1;
    }
}
