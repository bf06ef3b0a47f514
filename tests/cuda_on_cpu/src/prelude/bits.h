// Before every kernel: bits, integers and conversions.
#define __standin_cast(NAME, FROM, TO) \
  static inline TO NAME(FROM x) { \
    TO result; \
    __builtin_memcpy(&result, &x, sizeof result); \
    return result; \
  }
__standin_cast(__int_as_float, int, float)
__standin_cast(__uint_as_float, unsigned, float)
__standin_cast(__float_as_int, float, int)
__standin_cast(__float_as_uint, float, unsigned)
__standin_cast(__longlong_as_double, long long, double)
__standin_cast(__double_as_longlong, double, long long)
static inline double __hiloint2double(int high, int low) {
  return __longlong_as_double((long long)high << 32 | (unsigned)low);
}
static inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
static inline int __double2loint(double x) { return (int)__double_as_longlong(x); }
static inline int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __int2float_rn(int x) { return (float)x; }

static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned selector = selectors >> (4 * i) & 15, byte = (unsigned)(both >> (8 * (selector & 7))) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
  return result;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __umul24(unsigned a, unsigned b) { return a * b; }

// Half precision, as in cublas/half.h.
static inline float __standin_half_to_float(unsigned short half) {
  unsigned sign = (unsigned)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  float subnormal = (float)fraction * 5.9604644775390625e-8f;
  return sign ? -subnormal : subnormal;
}
static inline unsigned short __standin_float_to_half(float x) {
  unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (unsigned short)(sign | 0x7fff);
  if (magnitude >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
  if (magnitude >= 0x38800000) {
    magnitude += 0xfff + (magnitude >> 13 & 1);  // to the nearest, ties to even
    return (unsigned short)(sign | (magnitude - 0x38000000) >> 13);
  }
  return (unsigned short)(sign | (unsigned)__builtin_rintf(__uint_as_float(magnitude) * 16777216.0f));
}

// The PTX instructions bfe and bfi, which nvrtc/rewrite.cpp puts in the place of asm().
#define __standin_bit_field(TYPE, BITS) \
  static inline TYPE __standin_mask##BITS(unsigned length) { \
    return length > BITS - 1 ? ~(TYPE)0 : ((TYPE)1 << length) - 1; \
  } \
  static inline TYPE __standin_bfe##BITS(TYPE value, unsigned position, unsigned length) { \
    position &= 255; \
    return position > BITS - 1 ? 0 : value >> position & __standin_mask##BITS(length & 255); \
  } \
  static inline TYPE __standin_bfi##BITS(TYPE field, TYPE value, unsigned position, unsigned length) { \
    position &= 255; \
    if (position > BITS - 1) return value; \
    TYPE mask = __standin_mask##BITS(length & 255) << position; \
    return (value & ~mask) | (field << position & mask); \
  }
__standin_bit_field(unsigned, 32)
__standin_bit_field(unsigned long long, 64)
