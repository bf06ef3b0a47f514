// Before every kernel: functions that CUDA has and libm lacks.
static inline double normcdf(double x) { return 0.5 * __builtin_erfc(-x * 0.70710678118654752440); }
static inline float normcdff(float x) { return (float)normcdf((double)x); }

// The inverse of erfc: a first guess (Abramowitz and Stegun 26.2.22), then Halley's method, three steps.
static inline double erfcinv(double y) {
  if (!(y >= 0 && y <= 2)) return __builtin_nan("");
  if (y == 0) return __builtin_inf();
  if (y == 2) return -__builtin_inf();
  double z = y <= 1 ? y : 2 - y, t = __builtin_sqrt(-2 * __builtin_log(z / 2));
  double x = -0.70711 * ((2.30753 + t * 0.27061) / (1 + t * (0.99229 + t * 0.04481)) - t);
  for (int i = 0; i < 3; i++) {
    double error = __builtin_erfc(x) - z;
    x += error / (1.12837916709551257 * __builtin_exp(-x * x) - x * error);
  }
  return y <= 1 ? x : -x;
}
// Near 0 by itself, as 1 - y would lose its digits.
static inline double erfinv(double y) {
  if (y <= -0.5) return -erfcinv(1 + y);
  if (!(y < 0.5)) return erfcinv(1 - y);
  double x = y * 0.88622692545275801;
  for (int i = 0; i < 4; i++) {
    double error = __builtin_erf(x) - y;
    x -= error / (1.12837916709551257 * __builtin_exp(-x * x) + x * error);
  }
  return x;
}
static inline float erfcinvf(float y) { return (float)erfcinv((double)y); }
static inline float erfcinv(float y) { return erfcinvf(y); }
static inline float erfinvf(float y) { return (float)erfinv((double)y); }
static inline float erfinv(float y) { return erfinvf(y); }
static inline double normcdfinv(double p) { return -1.41421356237309504880 * erfcinv(2 * p); }
static inline float normcdfinvf(float p) { return (float)normcdfinv((double)p); }

// Modified Bessel functions by their power series.
static inline double cyl_bessel_i0(double x) {
  double term = 1, sum = 1;
  for (int k = 1; k < 500 && term > 1e-18 * sum; k++) {
    term *= x * x / (4.0 * k * k);
    sum += term;
  }
  return sum;
}
static inline double cyl_bessel_i1(double x) {
  double term = x / 2, sum = term;
  for (int k = 1; k < 500 && __builtin_fabs(term) > 1e-18 * __builtin_fabs(sum); k++) {
    term *= x * x / (4.0 * k * (k + 1));
    sum += term;
  }
  return sum;
}
static inline float cyl_bessel_i0f(float x) { return (float)cyl_bessel_i0((double)x); }
static inline float cyl_bessel_i1f(float x) { return (float)cyl_bessel_i1((double)x); }
static inline float cyl_bessel_i0(float x) { return cyl_bessel_i0f(x); }
static inline float cyl_bessel_i1(float x) { return cyl_bessel_i1f(x); }
