// Before every kernel: the indices of the thread that runs, barriers, and what the threads of a warp exchange.
static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
static void *__standin_dynamic;                   // the dynamic shared memory of the launch
static void (*__standin_barrier)(int);            // set by libcuda when it loads the module
static unsigned long long __standin_slots[1024];  // one a thread, for exchanges

// As in common.h.
#define __standin_sync_block 1
#define __standin_sync_warp 2

static inline unsigned __standin_thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
static inline unsigned __standin_threads() { return blockDim.x * blockDim.y * blockDim.z; }
static inline unsigned __standin_lane() { return __standin_thread() & 31; }

static inline void __syncthreads() { __standin_barrier(__standin_sync_block); }
static inline void __syncwarp(unsigned = ~0u) { __standin_barrier(__standin_sync_warp); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static inline int __syncthreads_count(int predicate) {
  unsigned thread = __standin_thread(), threads = __standin_threads(), count = 0;
  __syncthreads();
  __standin_slots[thread] = predicate != 0;
  __syncthreads();
  for (unsigned i = 0; i < threads; i++) count += (unsigned)__standin_slots[i];
  __syncthreads();
  return (int)count;
}
static inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
static inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }

// The value that the thread of the lane `from` gives.
template<class T> static inline T __standin_exchange(T value, unsigned from) {
  unsigned thread = __standin_thread(), source = (thread & ~31u) + from;
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  __standin_slots[thread] = bits;
  __syncwarp();
  bits = __standin_slots[source < __standin_threads() ? source : thread];
  __syncwarp();
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template<class T> static inline T __shfl_sync(unsigned, T value, int source, int width = 32) {
  return __standin_exchange(value, (__standin_lane() & ~(width - 1)) + (source & (width - 1)));
}
template<class T> static inline T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned lane = __standin_lane();
  return __standin_exchange(value, (lane & (width - 1)) < delta ? lane : lane - delta);
}
template<class T> static inline T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned lane = __standin_lane();
  return __standin_exchange(value, (lane & (width - 1)) + delta >= (unsigned)width ? lane : lane + delta);
}
template<class T> static inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  unsigned lane = __standin_lane(), other = lane ^ mask;
  return __standin_exchange(value, (other & ~(width - 1)) == (lane & ~(width - 1)) ? other : lane);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned thread = __standin_thread(), threads = __standin_threads(), warp = thread & ~31u, result = 0;
  __standin_slots[thread] = predicate != 0;
  __syncwarp();
  for (unsigned i = 0; i < 32 && warp + i < threads; i++)
    if (mask >> i & 1) result |= (unsigned)__standin_slots[warp + i] << i;
  __syncwarp();
  return result;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
static inline unsigned __activemask() { return ~0u; }

// nvrtc has these no longer for compute capability 7.0 and above.
#if __CUDA_ARCH__ < 700
template<class T> static inline T __shfl(T v, int source, int width = 32) { return __shfl_sync(~0u, v, source, width); }
template<class T> static inline T __shfl_up(T v, unsigned delta, int width = 32) {
  return __shfl_up_sync(~0u, v, delta, width);
}
template<class T> static inline T __shfl_down(T v, unsigned delta, int width = 32) {
  return __shfl_down_sync(~0u, v, delta, width);
}
template<class T> static inline T __shfl_xor(T v, int mask, int width = 32) {
  return __shfl_xor_sync(~0u, v, mask, width);
}
static inline unsigned __ballot(int predicate) { return __ballot_sync(~0u, predicate); }
static inline int __any(int predicate) { return __any_sync(~0u, predicate); }
static inline int __all(int predicate) { return __all_sync(~0u, predicate); }
#endif
