"""The CUDA driver through ctypes, for the tests' child processes, which run on the stand-in."""
import contextlib
import ctypes
import functools
import typing

import numpy as np

# Codes of CUresult that the tests expect.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILED = \
    1, 2, 3, 400, 600, 700, 719
PEER_ACCESS_UNSUPPORTED, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED = 217, 704, 705
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901

KERNELS = r'''
// Holds its stream until the host sets the flag.
extern "C" __global__ void hold(volatile int *flag, float *out) { while (!*flag) {} out[0] = 42; }
extern "C" __global__ void poke(float *out, long index) { out[index] = 1; }
extern "C" __global__ void divide(int *out, int by) { out[0] = 7 / by; }
extern "C" __global__ void block_sum(float *out, const float *in) {
  extern __shared__ float buffer[];
  int thread = threadIdx.x;
  buffer[thread] = in[thread];
  for (int distance = blockDim.x / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (thread < distance) buffer[thread] += buffer[thread + distance];
  }
  if (thread == 0) out[0] = buffer[0];
}
extern "C" __global__ void warp_sum(float *out) {
  float value = threadIdx.x;
  for (int distance = 16; distance; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = value;
  unsigned multiples = __ballot_sync(~0u, threadIdx.x % 3 == 0);
  if (threadIdx.x == 0) out[2] = __popc(multiples);
}
// A race between the threads of a block: the last one to run wins.
extern "C" __global__ void last_thread(float *out) { __syncthreads(); out[0] = threadIdx.x; }
'''


class Calls(typing.NamedTuple):
    """Numbers of the calls of a process for each kind of work of a device."""

    launches: int  # of kernels, and of functions of cuBLAS and cuDNN
    collectives: int  # of NCCL; all messages of a group are one
    graph_launches: int
    to_device: int  # copies from the host
    to_host: int
    on_device: int  # copies from the device's own memory
    between_devices: int  # copies, of the device with their stream


class CudaError(Exception):
    """An error: a function of the driver failed with `code`."""

    def __init__(self, name, code):
        super().__init__('%s gives error %d' % (name, code))
        self.code = code


def call(name, *arguments):
    """Call a function of the driver, nvrtc, cuBLAS or NCCL; raise CudaError unless it returns 0."""
    library = next((library for library in ('cublas', 'nvrtc', 'nccl') if name.startswith(library)), 'cuda')
    code = getattr(load(library), name)(*arguments)
    if code:
        raise CudaError(name, code)


@functools.lru_cache(None)
def load(library):
    loaded = ctypes.CDLL('libnccl.so.2' if library == 'nccl' else 'lib%s.so' % library)
    if library == 'cuda' and loaded.cuInit(0):
        raise CudaError('cuInit', loaded.cuInit(0))
    return loaded


@contextlib.contextmanager
def fails_with(code):
    """Assert that a block raises CudaError with `code`."""
    try:
        yield
    except CudaError as exc:
        assert exc.code == code, '%s, and %d was expected' % (exc, code)
    else:
        raise AssertionError('no error, and %d was expected' % code)


def out(kind, name, *arguments):
    """Call a function whose first argument is the address of its result, and return the result."""
    result = kind()
    call(name, ctypes.byref(result), *arguments)
    return result


def calls(ordinal=0):
    """Return the `Calls` of this process for a device since the last call of this function, or the process's start."""
    numbers = (ctypes.c_ulong * len(Calls._fields))()
    call('cudaOnCpuCalls', numbers, ordinal)
    return Calls(*numbers)


def compile_source(source, *options):
    """Return the image that nvrtc makes of a source; if it does not compile, a RuntimeError has the log."""
    program = out(ctypes.c_void_p, 'nvrtcCreateProgram', source.encode(), None, 0, None, None)
    try:
        call('nvrtcCompileProgram', program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    except CudaError as exc:
        size = ctypes.c_size_t()
        call('nvrtcGetProgramLogSize', program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call('nvrtcGetProgramLog', program, log)
        exc.log = log.value.decode()
        raise
    size = ctypes.c_size_t()
    call('nvrtcGetPTXSize', program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    call('nvrtcGetPTX', program, image)
    return image


class Device:
    """A device with its primary context and a stream."""

    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.context = out(ctypes.c_void_p, 'cuDevicePrimaryCtxRetain', ordinal)
        self.stream = self.out(ctypes.c_void_p, 'cuStreamCreate', 0)

    def call(self, name, *arguments):
        """Call a function while this device's context is current."""
        call('cuCtxPushCurrent_v2', self.context)
        try:
            call(name, *arguments)
        finally:
            call('cuCtxPopCurrent_v2', None)

    def out(self, kind, name, *arguments):
        """Call the function `out` while this device's context is current."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments)
        return result

    def allocate(self, nbytes):
        return self.out(ctypes.c_uint64, 'cuMemAlloc_v2', ctypes.c_size_t(nbytes))

    def free(self, address):
        self.call('cuMemFree_v2', address)

    def kernel(self, name, source=KERNELS):
        module = self.out(ctypes.c_void_p, 'cuModuleLoadData', compile_source(source))
        return self.out(ctypes.c_void_p, 'cuModuleGetFunction', module, name.encode())

    def launch(self, kernel, threads, *arguments, shared=0):
        """Start one block of a kernel on the stream."""
        pointers = [ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in arguments]
        parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        self.call('cuLaunchKernel', kernel, 1, 1, 1, threads, 1, 1, shared, self.stream, parameters, None)

    def synchronize(self):
        self.call('cuStreamSynchronize', self.stream)

    def upload(self, array):
        """Copy an array to new memory of the device, in the stream."""
        address = self.allocate(array.nbytes)
        pointer = array.ctypes.data_as(ctypes.c_void_p)
        self.call('cuMemcpyHtoDAsync_v2', address, pointer, ctypes.c_size_t(array.nbytes), self.stream)
        return address

    def read(self, address, count, dtype='float32'):
        """Return values from the device's memory, after the work in the stream."""
        array = np.empty(count, dtype)
        pointer = array.ctypes.data_as(ctypes.c_void_p)
        self.call('cuMemcpyDtoHAsync_v2', pointer, address, ctypes.c_size_t(array.nbytes), self.stream)
        return array


class Hold:
    """A kernel that keeps a device's stream busy until `release`, and then writes 42 to `address`."""

    def __init__(self, device, address):
        pinned = device.out(ctypes.c_void_p, 'cuMemAllocHost_v2', ctypes.c_size_t(4))
        self.flag = ctypes.c_int.from_address(pinned.value)
        device.launch(device.kernel('hold'), 1, pinned, address)

    def release(self):
        self.flag.value = 1
