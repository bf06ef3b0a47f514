"""Writes C++ that NVIDIA's cuda.h accepts if this package declares the driver's functions as it does."""
import ctypes

from theano_mgpu.devices import cuda_driver, cuda_graphs

HEAD = '''\
#include <cuda.h>
#include <cstddef>
#include <type_traits>
// Whether parameters are pointers, or numbers, of some sizes.
struct Kind { bool pointer; size_t size; };
template <class... A> constexpr bool agrees(CUresult (CUDAAPI *)(A...), const Kind (&kinds)[sizeof...(A)]) {
    const Kind real[] = {{std::is_pointer<A>::value, sizeof(A)}...};
    for (size_t i = 0; i < sizeof...(A); ++i)
        if (real[i].pointer != kinds[i].pointer || real[i].size != kinds[i].size)
            return false;
    return true;
}
static_assert(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == %d && CU_EVENT_DISABLE_TIMING == %d, "the numbers");
''' % (cuda_graphs.THREAD_LOCAL, cuda_driver.UNTIMED)
POINTERS = ctypes.c_void_p, ctypes.c_char_p


def main():
    print(HEAD)
    for name, types in {**cuda_driver.FUNCTIONS, **cuda_graphs.FUNCTIONS}.items():
        kinds = ', '.join('{%s, %d}' % (str(each in POINTERS).lower(), ctypes.sizeof(each)) for each in types)
        if types:
            print('static_assert(agrees(&%s, {%s}), "%s");' % (name, kinds, name))


if __name__ == '__main__':
    main()
