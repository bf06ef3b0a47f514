// The largest error of a function over values of float32. benchmarks/vector_math.py puts the code of the namespace
// mgpu_math before this, and defines OURS(x, y), LIBM(x, y), which is Theano's own code, and EXACT(x, y) for doubles.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

static const int BLOCK = 4096;

static float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

static bool are_equal(float one, float other) {
    return bits_of(one) == bits_of(other) || (std::isnan(one) && std::isnan(other));
}

// The distance in units of the last place of the exact value. Infinity is the number that follows the largest one.
static inline double units(double found, double exact) {
    const double limit = 0x1p128;
    found = std::min(std::max(found, -limit), limit);
    exact = std::min(std::max(exact, -limit), limit);
    uint64_t bits;
    std::memcpy(&bits, &exact, sizeof bits);
    bits = std::max<int64_t>((bits >> 52 & 0x7ff) - 23, 1023 - 149) << 52;
    double unit;
    std::memcpy(&unit, &bits, sizeof unit);
    return std::fabs(found - exact) / unit;
}

static __attribute__((noinline)) void compute(float* z, const float* x, const float* y, int n) {
    using namespace mgpu_math;
    #pragma GCC ivdep
    for (int i = 0; i < n; i++)
        z[i] = OURS(x[i], y[i]);
}

struct Errors {
    double ours, libm;          // units; of libm over every 16th value
    float at;                   // x of the largest of ours
    int64_t special, position;  // values at which NaN, infinity or a zero is not libm's; at which an element alone differs
};

// Every step-th value of float32 from the first on. The second argument is a number of moderate size that x determines.
extern "C" void sweep(uint32_t first, uint32_t step, uint64_t count, Errors* errors) {
    static float x[BLOCK], y[BLOCK], found[BLOCK];
    std::memset(errors, 0, sizeof *errors);
    for (uint64_t begin = 0; begin < count; begin += BLOCK) {
        const int n = std::min<uint64_t>(BLOCK, count - begin);
        for (int i = 0; i < n; i++) {
            const uint32_t bits = first + (uint32_t)(begin + i) * step, mixed = bits * 2654435761u ^ bits >> 15;
            x[i] = float_of(bits);
            y[i] = mixed % 8 ? (int32_t)mixed / 1e9f : (int32_t)mixed >> 28;
        }
        compute(found, x, y, n);
        for (int i = 0; i < n; i++) {
            const double exact = EXACT((double)x[i], (double)y[i]);
            const bool is_special = !std::isfinite(x[i]) || x[i] == 0 || !std::isfinite(found[i]) || found[i] == 0 ||
                                    std::isnan(exact), is_sampled = i % 16 == 0;
            if (is_special || is_sampled) {
                const float libm = LIBM(x[i], y[i]);
                float alone;
                compute(&alone, x + i, y + i, 1);
                errors->position += !are_equal(alone, found[i]);
                if (!std::isfinite(x[i]) || x[i] == 0 || std::isnan(libm) || std::isnan(found[i])) {
                    errors->special += !are_equal(libm, found[i]);
                    continue;
                }
                errors->libm = std::max(errors->libm, units(libm, exact));
            }
            errors->special += std::signbit(exact) != std::signbit(found[i]);
            const double ours = units(found[i], exact);
            if (ours > errors->ours) {
                errors->ours = ours;
                errors->at = x[i];
            }
        }
    }
}
