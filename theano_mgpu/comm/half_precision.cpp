#include <cstddef>
#include <cstdint>
#ifdef __x86_64__
#include <immintrin.h>

extern "C" int converts() {
    return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}

extern "C" __attribute__((target("avx,f16c")))
void to_half(uint16_t *out, const float *in, float scale, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(in + i), _mm256_set1_ps(scale)), 0));
    for (; i < size; ++i)
        out[i] = _cvtss_sh(in[i] * scale, 0);
}

extern "C" __attribute__((target("avx,f16c")))
void from_half(float *out, const uint16_t *in, float scale, size_t size, int add) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        __m256 eight = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))),
                                     _mm256_set1_ps(scale));
        _mm256_storeu_ps(out + i, add ? _mm256_add_ps(_mm256_loadu_ps(out + i), eight) : eight);
    }
    for (; i < size; ++i)
        out[i] = (add ? out[i] : 0.0f) + _cvtsh_ss(in[i]) * scale;
}
#else
extern "C" int converts() { return 0; }
#endif
