"""Bytes of memory on the devices of the CUDA stand-in."""
import ctypes


def peaks(n_devices):
    """Return the most bytes that each device has had allocated at one time since the last call.

    Exact with Theano's flag ``gpuarray.preallocate=-1``; else libgpuarray keeps blocks for later arrays.
    """
    driver, found = ctypes.CDLL('libcuda.so'), []
    for ordinal in range(n_devices):
        found.append(ctypes.c_size_t())
        driver.cudaOnCpuPeakMemory(ctypes.byref(found[-1]), ordinal)
    return [each.value for each in found]
