// Before every kernel: the keywords and types of CUDA. nvrtc includes no header of the host, and neither does this.
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
#define NULL 0
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __NVCC__ 1
#define __CUDACC_VER_MAJOR__ 10
#define __CUDACC_VER_MINOR__ 2
#define __global__ __attribute__((used))
#define __device__
#define __host__
#define __constant__
#define __shared__ static  // a worker runs the blocks of a module one after the other, so one copy is enough
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __standin_export extern "C" __attribute__((visibility("default"), used))

#define __standin_vectors(TYPE, NAME) \
  struct NAME##1 { TYPE x; }; \
  struct NAME##2 { TYPE x, y; }; \
  struct NAME##3 { TYPE x, y, z; }; \
  struct NAME##4 { TYPE x, y, z, w; }; \
  static inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return NAME##2{x, y}; } \
  static inline NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return NAME##3{x, y, z}; } \
  static inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return NAME##4{x, y, z, w}; }
__standin_vectors(char, char)
__standin_vectors(unsigned char, uchar)
__standin_vectors(short, short)
__standin_vectors(unsigned short, ushort)
__standin_vectors(int, int)
__standin_vectors(unsigned int, uint)
__standin_vectors(long long, longlong)
__standin_vectors(unsigned long long, ulonglong)
__standin_vectors(float, float)
__standin_vectors(double, double)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

extern "C" int printf(const char *, ...);
#define assert(condition) ((void)0)
