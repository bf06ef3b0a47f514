// Sums of matrix products in the order of a tree, block by block; see tree_products.py.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#define GEMM(name, T) \
    extern "C" void name(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*, \
                         const T*, const int*, const T*, T*, const int*); \
    static void gemm(int rows, int columns, int inner, const T* a, int lda, const T* b, int ldb, T* c) { \
        const T one = 1, zero = 0; \
        name("N", "T", &rows, &columns, &inner, &one, a, &lda, b, &ldb, &zero, c, &rows); \
    }
GEMM(sgemm_, float)
GEMM(dgemm_, double)

namespace {

const int BLOCK = 1 << 14, WIDTH = 128;  // elements and columns of a block
const int CHUNK = 1 << 10;               // elements of a part of it for the first-level cache

// Add each of the last blocks before `end` to the one before it, from the last one on.
template <class T> void fold(T* end, int additions, int size) {
    for (int at = 0; at < size; at += CHUNK)
        for (int i = 1; i <= additions; i++) {
            const T* __restrict__ last = end - i * BLOCK + at;
            T* __restrict__ total = end - (i + 1) * BLOCK + at;
            for (int j = 0, n = std::min(CHUNK, size - at); j < n; j++)
                total[j] += last[j];
        }
}

template <class T> struct Sums {
    int shards;
    const T *const *left, *const *right;
    const int *samples, *additions;  // of each shard; the nodes before it that its product is added to
    int m, n, nodes;
    T *const *sums;
    std::atomic<int> next;

    // Compute what is left of the blocks.
    void work() {
        const std::unique_ptr<T[]> blocks(new T[(size_t)shards * BLOCK]);  // the system provides what is written to
        const int columns = std::min(WIDTH, n), rows = BLOCK / columns;
        const int wide = (n + columns - 1) / columns, high = (m + rows - 1) / rows;
        for (int i; (i = next++) < wide * high;) {
            const int top = i / wide * rows, start = i % wide * columns;
            const int height = std::min(rows, m - top), width = std::min(columns, n - start);
            T* end = blocks.get();
            for (int shard = 0; shard < shards; shard++) {
                gemm(width, height, samples[shard], right[shard] + start, n, left[shard] + top, m, end);
                end += BLOCK;
                fold(end, additions[shard], height * width);
                end -= additions[shard] * BLOCK;
            }
            for (int node = 0; node < nodes; node++)
                for (int row = 0; row < height; row++)
                    std::copy_n(blocks.get() + (size_t)node * BLOCK + row * width, width,
                                sums[node] + (size_t)(top + row) * n + start);
        }
    }
};

template <class T> void add(int threads, int shards, const T* const* left, const T* const* right, const int* samples,
                            const int* additions, int m, int n, int nodes, T* const* sums) {
    Sums<T> all{shards, left, right, samples, additions, m, n, nodes, sums, {0}};
    std::vector<std::thread> others;
    try {
        while (--threads > 0)
            others.emplace_back([&all] { all.work(); });
    } catch (const std::system_error&) {  // no more threads are to be had
    }
    all.work();
    for (auto& each : others)
        each.join();
}

}

extern "C" void add_float32(int threads, int shards, const float* const* left, const float* const* right,
                            const int* samples, const int* additions, int m, int n, int nodes, float* const* sums) {
    add(threads, shards, left, right, samples, additions, m, n, nodes, sums);
}

extern "C" void add_float64(int threads, int shards, const double* const* left, const double* const* right,
                            const int* samples, const int* additions, int m, int n, int nodes, double* const* sums) {
    add(threads, shards, left, right, samples, additions, m, n, nodes, sums);
}
