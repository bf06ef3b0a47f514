/* Functions of libmvec for loops that g++ vectorises, see vector_math.py. MGPU_VECTOR_exp, say, defines mgpu_math::exp. */
#ifndef MGPU_VECTOR_MATH
#define MGPU_VECTOR_MATH
#include <cmath>
/* The vectors that the library takes, and its functions for them. */
#if defined(__AVX2__) && defined(__FMA__)
#define MGPU_BYTES 32
#define MGPU_OF_FLOATS(name, v) _ZGVdN8##v##_##name##f
#define MGPU_OF_DOUBLES(name, v) _ZGVdN4##v##_##name
#else
#define MGPU_BYTES 16
#define MGPU_OF_FLOATS(name, v) _ZGVbN4##v##_##name##f
#define MGPU_OF_DOUBLES(name, v) _ZGVbN2##v##_##name
#endif

namespace mgpu_math {
template <class T, int bytes> struct vector { typedef T type __attribute__((vector_size(bytes))); };
template <class T> using of_16 = typename vector<T, 16>::type;
template <class T> using of_32 = typename vector<T, 32>::type;
template <class T> using of_64 = typename vector<T, 64>::type;
template <class T> using whole = typename vector<T, MGPU_BYTES>::type;

/* A call for a vector of any length, or for one element. Elements that the library's vector has besides are 1, where no
   function is slow. */
template <class Whole, class Given> static inline Whole part_of(const Given& x, unsigned begin) {
    Whole part = Whole() + 1;
    __builtin_memcpy(&part, (const char*)&x + begin, sizeof x < sizeof part ? sizeof x : sizeof part);
    return part;
}
template <class Whole, class Function, class Given, class... More>
static inline Given call(Function function, const Given& x, const More&... more) {
    Given result;
    for (unsigned begin = 0; begin < sizeof x; begin += sizeof(Whole)) {
        const Whole part = function(part_of<Whole>(x, begin), part_of<Whole>(more, begin)...);
        __builtin_memcpy((char*)&result + begin, &part, sizeof x < sizeof part ? sizeof x : sizeof part);
    }
    return result;
}
}

/* Parameters and arguments by the letters of the vector ABI: v for one, vv for two. */
#define MGPU_GIVEN_v(T) T x
#define MGPU_GIVEN_vv(T) T x, T y
#define MGPU_PASSED_v x
#define MGPU_PASSED_vv x, y
#define MGPU_CLASSES_v class A
#define MGPU_CLASSES_vv class A, class B
#define MGPU_ANY_v A x
#define MGPU_ANY_vv A x, B y

/* g++ calls a form of a function by the name `called`. */
#define MGPU_FORM(letter, called, F, v, T, symbol, library) \
    static __attribute__((used)) F mgpu_##letter##_##symbol(MGPU_GIVEN_##v(F)) __asm__(called); \
    static F mgpu_##letter##_##symbol(MGPU_GIVEN_##v(F)) { \
        return mgpu_math::call<mgpu_math::whole<T> >(library, MGPU_PASSED_##v); \
    }
/* Forms of the vector ABI of x86 (sourceware.org/glibc/wiki/libmvec). */
#define MGPU_VECTORS(letter, lanes, F, v, T, symbol, library) \
    MGPU_FORM(letter, "_ZGV" #letter "N" #lanes #v "_mgpu_" #symbol, F, v, T, symbol, library)
#define MGPU_NOTHING(...)
#ifdef __SSE2__
#define MGPU_SSE2 MGPU_VECTORS
#else
#define MGPU_SSE2 MGPU_NOTHING
#endif
#ifdef __AVX__
#define MGPU_AVX MGPU_VECTORS
#else
#define MGPU_AVX MGPU_NOTHING
#endif
#ifdef __AVX2__
#define MGPU_AVX2 MGPU_VECTORS
#else
#define MGPU_AVX2 MGPU_NOTHING
#endif
#ifdef __AVX512F__
#define MGPU_AVX512 MGPU_VECTORS
#else
#define MGPU_AVX512 MGPU_NOTHING
#endif

#define MGPU_PRECISION(T, name, symbol, v, library, lanes, twice, four_times) \
    extern "C" T mgpu_##symbol(MGPU_GIVEN_##v(T)) __attribute__((simd("notinbranch"), const, nothrow)); \
    extern "C" mgpu_math::whole<T> library(MGPU_GIVEN_##v(mgpu_math::whole<T>)); \
    namespace mgpu_math { \
    static inline T name(MGPU_GIVEN_##v(T)) { return mgpu_##symbol(MGPU_PASSED_##v); } \
    } \
    MGPU_FORM(1, "mgpu_" #symbol, T, v, T, symbol, library) \
    MGPU_SSE2(b, lanes, mgpu_math::of_16<T>, v, T, symbol, library) \
    MGPU_AVX(c, twice, mgpu_math::of_32<T>, v, T, symbol, library) \
    MGPU_AVX2(d, twice, mgpu_math::of_32<T>, v, T, symbol, library) \
    MGPU_AVX512(e, four_times, mgpu_math::of_64<T>, v, T, symbol, library)
/* Arguments of other types are left to libm: powers of integers, for example, are exact. */
#define MGPU_FUNCTION(name, v) \
    namespace mgpu_math { \
    template <MGPU_CLASSES_##v> static inline auto name(MGPU_ANY_##v) -> decltype(std::name(MGPU_PASSED_##v)) { \
        return std::name(MGPU_PASSED_##v); \
    } \
    } \
    MGPU_PRECISION(float, name, name##f, v, MGPU_OF_FLOATS(name, v), 4, 8, 16) \
    MGPU_PRECISION(double, name, name, v, MGPU_OF_DOUBLES(name, v), 2, 4, 8)
#define MGPU_MADE(name, code) namespace mgpu_math { template <class T> static inline T name(T x) { code } }

#define MGPU_VECTOR_exp MGPU_FUNCTION(exp, v)
#define MGPU_VECTOR_expm1 MGPU_FUNCTION(expm1, v)
#define MGPU_VECTOR_log MGPU_FUNCTION(log, v)
#define MGPU_VECTOR_log1p MGPU_FUNCTION(log1p, v)
#define MGPU_VECTOR_tanh MGPU_FUNCTION(tanh, v)
#define MGPU_VECTOR_erf MGPU_FUNCTION(erf, v)
/* Theano writes constants as numbers of double precision. */
#define MGPU_VECTOR_pow MGPU_FUNCTION(pow, vv) \
    namespace mgpu_math { \
    static inline double pow(float x, double y) { return pow((double)x, y); } \
    static inline double pow(double x, float y) { return pow(x, (double)y); } \
    }
/* Theano's own code of these has branches to keep exp from overflow. Its sigmoid is 1 from 15 on, an error of 5 ulp. */
#define MGPU_VECTOR_sigmoid \
    MGPU_MADE(sigmoid, const T e = exp(-std::fabs(x)); return (x < T(0) ? e : T(1)) / (T(1) + e);)
#define MGPU_VECTOR_softplus \
    MGPU_MADE(softplus, return (x > T(0) ? x : T(0)) + log1p(exp(-std::fabs(x)));)
#endif
