// Before every kernel: what libcuda must know of a kernel and of a module, derived from the kernel's type. After the
// source, nvrtc/compile.cpp writes __standin_register(NAME) for each kernel, and __standin_module(USES_BARRIER).
template<int...> struct __standin_indices {};
template<class T> struct __standin_is_pointer { static const bool value = false; };
template<class T> struct __standin_is_pointer<T *> { static const bool value = true; };

template<class F> struct __standin_signature;
template<class... A> struct __standin_signature<void (*)(A...)> {
  static const int count = sizeof...(A);
  static const unsigned sizes[sizeof...(A) + 1];
  static const unsigned char pointers[sizeof...(A) + 1];
  typedef __standin_indices<__integer_pack((int)sizeof...(A))...> indices;

  template<void (*F)(A...), int... I> static inline void call(void **p, __standin_indices<I...>) { F(*(A *)p[I]...); }
  template<void (*F)(A...)> static void run_thread(void **p) { call<F>(p, indices()); }
  template<void (*F)(A...)> static void run_block(void **p) { call<run_threads<F>>(p, indices()); }

  // The kernel is part of the loop: its arguments then stay in registers, and are not passed again for each thread.
  template<void (*F)(A...)> __attribute__((flatten)) static void run_threads(A... arguments) {
    unsigned size_x = blockDim.x, size_y = blockDim.y, size_z = blockDim.z;
    for (unsigned z = 0; z < size_z; z++)
      for (unsigned y = 0; y < size_y; y++)
        for (unsigned x = 0; x < size_x; x++) {
          threadIdx.x = x;
          threadIdx.y = y;
          threadIdx.z = z;
          F(arguments...);
        }
  }
};
template<class... A>
const unsigned __standin_signature<void (*)(A...)>::sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
template<class... A>
const unsigned char __standin_signature<void (*)(A...)>::pointers[sizeof...(A) + 1] = {
  __standin_is_pointer<A>::value..., 0
};

// The layouts of KernelInfo and ModuleInfo in common.h.
struct __standin_kernel_info {
  const char *name;
  int count;
  const unsigned *sizes;
  const unsigned char *pointers;
  void (*run_thread)(void **);
  void (*run_block)(void **);
};
struct __standin_module_info {
  unsigned long long magic;
  uint3 *thread_index, *block_index, *block_size, *grid_size;
  void **dynamic_shared;
  void (**barrier)(int);
  int uses_barrier;
};

#define __standin_register_(NAME) \
  __standin_export const __standin_kernel_info __standin_kernel_##NAME = { \
    #NAME, __standin_signature<decltype(&NAME)>::count, __standin_signature<decltype(&NAME)>::sizes, \
    __standin_signature<decltype(&NAME)>::pointers, &__standin_signature<decltype(&NAME)>::run_thread<&NAME>, \
    &__standin_signature<decltype(&NAME)>::run_block<&NAME> \
  };
// Two steps, so that a NAME that is a macro is replaced first.
#define __standin_register(NAME) __standin_register_(NAME)
#define __standin_module(USES_BARRIER) \
  __standin_export const __standin_module_info __standin_module = { \
    0x31696e646e617473ull, &threadIdx, &blockIdx, &blockDim, &gridDim, &__standin_dynamic, &__standin_barrier, \
    USES_BARRIER \
  };
