// Before every kernel: mathematics by the compiler's built-in functions, which libm computes.
template<class T> struct __standin_integral {};
#define __standin_is_integral(T) \
  template<> struct __standin_integral<T> { typedef double to_double; };
__standin_is_integral(bool)
__standin_is_integral(char)
__standin_is_integral(signed char)
__standin_is_integral(unsigned char)
__standin_is_integral(short)
__standin_is_integral(unsigned short)
__standin_is_integral(int)
__standin_is_integral(unsigned)
__standin_is_integral(long)
__standin_is_integral(unsigned long)
__standin_is_integral(long long)
__standin_is_integral(unsigned long long)
template<class A, class B> struct __standin_mixed { typedef double to_double; };
template<> struct __standin_mixed<float, float> {};
template<> struct __standin_mixed<double, double> {};

// As CUDA overloads them: float for float, double for double, integers and mixed types.
#define __standin_math1(NAME) \
  static inline float NAME##f(float x) { return __builtin_##NAME##f(x); } \
  static inline float NAME(float x) { return __builtin_##NAME##f(x); } \
  static inline double NAME(double x) { return __builtin_##NAME(x); } \
  template<class T> static inline typename __standin_integral<T>::to_double NAME(T x) { \
    return __builtin_##NAME((double)x); \
  }
#define __standin_math2(NAME) \
  static inline float NAME##f(float x, float y) { return __builtin_##NAME##f(x, y); } \
  static inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); } \
  static inline double NAME(double x, double y) { return __builtin_##NAME(x, y); } \
  template<class A, class B> static inline typename __standin_mixed<A, B>::to_double NAME(A x, B y) { \
    return __builtin_##NAME((double)x, (double)y); \
  }
__standin_math1(sin) __standin_math1(cos) __standin_math1(tan) __standin_math1(asin)
__standin_math1(acos) __standin_math1(atan) __standin_math1(sinh) __standin_math1(cosh)
__standin_math1(tanh) __standin_math1(asinh) __standin_math1(acosh) __standin_math1(atanh)
__standin_math1(exp) __standin_math1(exp2) __standin_math1(exp10) __standin_math1(expm1)
__standin_math1(log) __standin_math1(log2) __standin_math1(log10) __standin_math1(log1p)
__standin_math1(logb) __standin_math1(sqrt) __standin_math1(cbrt) __standin_math1(ceil)
__standin_math1(floor) __standin_math1(trunc) __standin_math1(round) __standin_math1(rint)
__standin_math1(nearbyint) __standin_math1(fabs) __standin_math1(erf) __standin_math1(erfc)
__standin_math1(lgamma) __standin_math1(tgamma) __standin_math1(j0) __standin_math1(j1)
__standin_math1(y0) __standin_math1(y1) __standin_math2(pow) __standin_math2(atan2)
__standin_math2(fmod) __standin_math2(fmin) __standin_math2(fmax) __standin_math2(hypot)
__standin_math2(copysign) __standin_math2(fdim) __standin_math2(nextafter) __standin_math2(remainder)
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
static inline float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
static inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
static inline double ldexp(double x, int e) { return __builtin_ldexp(x, e); }
static inline float frexpf(float x, int *e) { return __builtin_frexpf(x, e); }
static inline float frexp(float x, int *e) { return __builtin_frexpf(x, e); }
static inline double frexp(double x, int *e) { return __builtin_frexp(x, e); }
static inline float modff(float x, float *i) { return __builtin_modff(x, i); }
static inline float modf(float x, float *i) { return __builtin_modff(x, i); }
static inline double modf(double x, double *i) { return __builtin_modf(x, i); }
static inline long lround(double x) { return __builtin_lround(x); }
static inline long lrint(double x) { return __builtin_lrint(x); }
static inline int ilogb(double x) { return __builtin_ilogb(x); }
static inline float jnf(int n, float x) { return __builtin_jnf(n, x); }
static inline float jn(int n, float x) { return __builtin_jnf(n, x); }
static inline double jn(int n, double x) { return __builtin_jn(n, x); }
static inline float ynf(int n, float x) { return __builtin_ynf(n, x); }
static inline double yn(int n, double x) { return __builtin_yn(n, x); }
static inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
static inline double nan(const char *) { return __builtin_nan(""); }
static inline float nanf(const char *) { return __builtin_nanf(""); }
static inline float scalbnf(float x, int e) { return __builtin_ldexpf(x, e); }
static inline double scalbn(double x, int e) { return __builtin_ldexp(x, e); }
static inline void sincosf(float x, float *s, float *c) { *s = __builtin_sinf(x); *c = __builtin_cosf(x); }
static inline void sincos(double x, double *s, double *c) { *s = __builtin_sin(x); *c = __builtin_cos(x); }
#define __standin_class(NAME) \
  static inline bool NAME(float x) { return __builtin_##NAME(x); } \
  static inline bool NAME(double x) { return __builtin_##NAME(x); } \
  template<class T> static inline bool NAME(T x) { return __builtin_##NAME((double)x); }
__standin_class(isnan)
__standin_class(isinf)
__standin_class(isfinite)
__standin_class(signbit)
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long abs(long x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
static inline float abs(float x) { return __builtin_fabsf(x); }
static inline double abs(double x) { return __builtin_fabs(x); }
static inline long labs(long x) { return abs(x); }
static inline long long llabs(long long x) { return abs(x); }
#define __standin_minmax(A, B, R) \
  static inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
  static inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
__standin_minmax(int, int, int)
__standin_minmax(unsigned, unsigned, unsigned)
__standin_minmax(int, unsigned, unsigned)
__standin_minmax(unsigned, int, unsigned)
__standin_minmax(long, long, long)
__standin_minmax(unsigned long, unsigned long, unsigned long)
__standin_minmax(long, unsigned long, unsigned long)
__standin_minmax(unsigned long, long, unsigned long)
__standin_minmax(long long, long long, long long)
__standin_minmax(unsigned long long, unsigned long long, unsigned long long)
__standin_minmax(long long, unsigned long long, unsigned long long)
__standin_minmax(unsigned long long, long long, unsigned long long)
#define __standin_fminmax(A, B, R, S) \
  static inline R min(A a, B b) { return __builtin_fmin##S((R)a, (R)b); } \
  static inline R max(A a, B b) { return __builtin_fmax##S((R)a, (R)b); }
__standin_fminmax(float, float, float, f)
__standin_fminmax(double, double, double, )
__standin_fminmax(float, double, double, )
__standin_fminmax(double, float, double, )
