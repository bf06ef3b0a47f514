#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

// Bytes of the processor's widest vectors: of wider ones GCC keeps the parts in memory, not in registers.
#if defined(__AVX512F__)
const size_t VECTOR = 64;
#elif defined(__AVX__)
const size_t VECTOR = 32;
#else
const size_t VECTOR = 16;
#endif

template <typename T>
struct Sum {
    // The partial sums stay in registers while all buffers are read side by side: the processor then prefetches many
    // streams at once, and a core reads twice as fast as when it sums block after block in its cache.
    typedef T Vector __attribute__((vector_size(VECTOR)));
    typedef T Unaligned __attribute__((vector_size(VECTOR), aligned(sizeof(T)), may_alias));
    static const size_t WIDTH = VECTOR / sizeof(T), VECTORS = 8, GROUP = VECTORS * WIDTH, CHUNK = (1 << 18) / sizeof(T);

    T *out;
    const T *const *buffers;
    int count;
    size_t size;
    bool stream;
    std::atomic<size_t> next, summed;

    void group(size_t at) {
        Vector sum[VECTORS];
        for (size_t v = 0; v < VECTORS; ++v)
            sum[v] = *(const Unaligned *)(buffers[0] + at + v * WIDTH);
        for (int i = 1; i < count; ++i)
            for (size_t v = 0; v < VECTORS; ++v)
                sum[v] += *(const Unaligned *)(buffers[i] + at + v * WIDTH);
#ifdef __SSE2__
        if (stream) {
            for (size_t j = 0; j < sizeof(sum) / 16; ++j)
                _mm_stream_si128((__m128i *)(out + at) + j, ((const __m128i *)sum)[j]);
            return;
        }
#endif
        for (size_t v = 0; v < VECTORS; ++v)
            *(Unaligned *)(out + at + v * WIDTH) = sum[v];
    }

    // A free thread takes the next chunk, so that a thread whose core is busy delays only its own chunk.
    void work() {
        size_t begin;
        while ((begin = next.fetch_add(CHUNK)) < size) {
            size_t at = begin, end = std::min(begin + CHUNK, size);
            for (; at + GROUP <= end; at += GROUP)
                group(at);
            for (; at < end; ++at) {
                T sum = buffers[0][at];
                for (int i = 1; i < count; ++i)
                    sum += buffers[i][at];
                out[at] = sum;
            }
#ifdef __SSE2__
            _mm_sfence();  // Streamed lines are seen by other threads before `summed` is.
#endif
            summed += end - begin;
        }
    }
};

template <typename T>
void add(T *out, const T *const *buffers, int count, size_t size, int stream, int threads) {
    // No wait for a helper that got a core only after the work was done: it finds no work left, and lets go of the
    // shared Sum.
    std::shared_ptr<Sum<T>> sum(new Sum<T>{
        out, buffers, count, size, stream && (uintptr_t)out % 16 == 0, {0}, {0}});
    try {
        for (int i = 1; i < threads; ++i)
            std::thread([sum] { sum->work(); }).detach();
    } catch (const std::system_error &) {
        // No more threads are to be had: those that started, and this one, do the work.
    }
    sum->work();
    while (sum->summed < size)
        std::this_thread::yield();
}

}

extern "C" void sum_float32(float *out, const float *const *buffers, int count, size_t size, int stream, int threads) {
    add(out, buffers, count, size, stream, threads);
}

extern "C" void sum_float64(double *out, const double *const *buffers, int count, size_t size, int stream,
                            int threads) {
    add(out, buffers, count, size, stream, threads);
}
