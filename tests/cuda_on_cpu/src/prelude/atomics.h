// Before every kernel: atomic operations. They are atomic between devices too, as workers are threads of one process.
#define __standin_atomic(NAME, TYPE, RESULT) \
  static inline TYPE NAME(TYPE *address, TYPE value) { \
    TYPE old, result; \
    __atomic_load(address, &old, __ATOMIC_RELAXED); \
    do { \
      result = (TYPE)(RESULT); \
    } while (!__atomic_compare_exchange(address, &old, &result, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)); \
    return old; \
  }
#define __standin_atomic_add(TYPE) \
  __standin_atomic(atomicExch, TYPE, value) \
  __standin_atomic(atomicAdd, TYPE, old + value)
#define __standin_atomic_integer(TYPE) \
  __standin_atomic(atomicMin, TYPE, old < value ? old : value) \
  __standin_atomic(atomicMax, TYPE, old > value ? old : value) \
  __standin_atomic(atomicAnd, TYPE, old & value) \
  __standin_atomic(atomicOr, TYPE, old | value) \
  __standin_atomic(atomicXor, TYPE, old ^ value) \
  static inline TYPE atomicCAS(TYPE *address, TYPE expected, TYPE value) { \
    __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    return expected; \
  }
__standin_atomic_add(int)
__standin_atomic_add(unsigned)
__standin_atomic_add(unsigned long long)
__standin_atomic_add(float)
#if __CUDA_ARCH__ >= 600
__standin_atomic(atomicAdd, double, old + value)
#endif
__standin_atomic_integer(int)
__standin_atomic_integer(unsigned)
__standin_atomic_integer(unsigned long long)
__standin_atomic(atomicSub, int, old - value)
__standin_atomic(atomicSub, unsigned, old - value)
__standin_atomic(atomicInc, unsigned, old >= value ? 0 : old + 1)
__standin_atomic(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
