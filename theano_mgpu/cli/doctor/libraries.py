"""The shared libraries that libgpuarray opens by name."""
import ctypes
import glob

# What each library of CUDA is needed for.
CUDA_LIBRARIES = {'libcuda.so': 'every CUDA call', 'libnvrtc.so': 'every GPU kernel', 'libcublas.so': 'gemm',
                  'libnccl.so': 'pygpu.collectives'}
OPTIONAL = {'libnccl.so'}


def load_error(name):
    """Why the dynamic linker cannot open a library by this name, as text; None if it can."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return None


def nvidia_gpu_present():
    """Whether this machine has an NVIDIA GPU with its driver (Linux, or WSL)."""
    return any(glob.glob(pattern) for pattern in ('/dev/nvidia[0-9]*', '/proc/driver/nvidia/gpus/*',
                                                  '/usr/lib/wsl/lib/libcuda.so*'))
