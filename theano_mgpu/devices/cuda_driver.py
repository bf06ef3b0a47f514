"""The part of the CUDA driver that the package calls itself, through ctypes."""
from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Iterator, Sequence

from ..errors import ExchangeError
from . import cuda_contexts

INTEGER, ADDRESS, SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
UNTIMED, APART = 2, 1  # flags of an event without a time, and of a stream that never waits for the default one
LAST, FIRST = 0, -5  # priorities of a stream: of computations, and the highest one
# The arguments of each function that is called here, or from nccl.cpp.
FUNCTIONS: dict[str, list[Any]] = {
    'cuCtxPushCurrent_v2': [ADDRESS], 'cuCtxPopCurrent_v2': [ADDRESS], 'cuMemcpyDtoDAsync_v2': [],
    'cuEventCreate': [ADDRESS, INTEGER], 'cuEventRecord': [ADDRESS, ADDRESS], 'cuEventQuery': [ADDRESS],
    'cuDeviceGetCount': [ADDRESS], 'cuDeviceGetPCIBusId': [ctypes.c_char_p, INTEGER, INTEGER],
    'cuDevicePrimaryCtxRetain': [ADDRESS, INTEGER], 'cuGetErrorName': [INTEGER, ADDRESS],
    'cuMemAllocHost_v2': [ADDRESS, SIZE], 'cuMemFreeHost': [ADDRESS], 'cuCtxSynchronize': [],
    'cuMemcpyDtoHAsync_v2': [ADDRESS, SIZE, SIZE, ADDRESS], 'cuMemcpyHtoDAsync_v2': [SIZE, ADDRESS, SIZE, ADDRESS],
    'cuStreamCreateWithPriority': [ADDRESS, INTEGER, INTEGER], 'cuStreamWaitEvent': [ADDRESS, ADDRESS, INTEGER],
    'cuDeviceCanAccessPeer': [ADDRESS, INTEGER, INTEGER], 'cuCtxEnablePeerAccess': [ADDRESS, INTEGER],
    'cuCtxDisablePeerAccess': [ADDRESS],
    'cuStreamSynchronize': [ADDRESS], 'cuEventSynchronize': [ADDRESS], 'cuEventDestroy_v2': [ADDRESS],
}


class Driver:
    """The functions of the driver; an ExchangeError says if it cannot be loaded, or lacks a function."""

    def __init__(self) -> None:
        self.library = declared('libcuda.so', FUNCTIONS)
        self._names = set(FUNCTIONS)

    def declare(self, functions: dict[str, list[Any]]) -> None:
        """Add functions, with the types of their arguments; raise an ExchangeError if the driver lacks one."""
        _declare(self.library, functions, 'libcuda.so')
        self._names.update(functions)

    def function(self, name: str) -> Any:
        """Return a function that is declared; without types, ctypes would cut addresses to 32 bits."""
        if name not in self._names:
            raise KeyError('the types of %s are not declared' % name)
        return getattr(self.library, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise a RuntimeError for another code than 0, as Theano's own calls do."""
        self.check(name, self.function(name)(*arguments))

    def address_by(self, name: str, *arguments: Any) -> int:
        """Return the address that a function writes to its first argument, which comes before these."""
        address = ADDRESS()
        self.call(name, ctypes.byref(address), *arguments)
        return address.value or 0

    def check(self, name: str, code: int) -> None:
        """Raise a RuntimeError for the code of a function, unless it is 0."""
        if code:
            raise RuntimeError('%s: %s' % (name, self.text_of(code)))

    def text_of(self, code: int) -> str:
        """Return the name of a code of the driver."""
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b'error %d' % code).decode()

    def device_at(self, bus_id: str) -> int:
        """Return the driver's number of the device with a PCI bus id."""
        count, name = INTEGER(), ctypes.create_string_buffer(32)
        self.library.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            self.library.cuDeviceGetPCIBusId(name, len(name), device)
            if name.value.decode() == bus_id:
                return device
        raise ExchangeError('no CUDA device is at %s' % bus_id)

    def primary_context(self, bus_id: str) -> int:
        """Return the address of the context of a device that libgpuarray, NCCL and others share."""
        return self.address_by('cuDevicePrimaryCtxRetain', self.device_at(bus_id))

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[Any]:
        """Make a context current, and give `call`; without one, NCCL would make one of device 0, and leave it."""
        self.library.cuCtxPushCurrent_v2(context)
        try:
            yield self.call
        finally:
            self.library.cuCtxPopCurrent_v2(ctypes.byref(ADDRESS()))

    def stream(self, context: int, priority: int = LAST) -> int:
        """Return the address of a new stream of a context, which is kept until the process ends."""
        with self.current(context):
            return self.address_by('cuStreamCreateWithPriority', APART, priority)

    def event(self, context: int) -> int:
        """Return the address of a new event of a context, without a time."""
        with self.current(context):
            return self.address_by('cuEventCreate', UNTIMED)

    def allocate_host(self, context: int, size: int) -> int:
        """Return the address of page-locked memory of some bytes; 0 if there is too little."""
        address = ADDRESS()
        with self.current(context):
            code = cuda_contexts.library().allocate_host(self.library.cuMemAllocHost_v2, ctypes.byref(address), size)
        return 0 if code else address.value or 0

    def free_host(self, contexts: Sequence[int], address: int) -> None:
        """Free page-locked memory of the last one of some contexts, once none of them copies from it or to it."""
        for context in contexts:
            with self.current(context):
                self.library.cuCtxSynchronize()
        with self.current(contexts[-1]):
            cuda_contexts.library().free_host(self.library.cuMemFreeHost, address)


@functools.lru_cache(maxsize=None)
def load_driver() -> Driver:
    """Return the functions of the driver of this process."""
    return Driver()


def declared(path: str, functions: dict[str, list[Any]]) -> ctypes.CDLL:
    """Return a library with the types of its functions; raise an ExchangeError if it cannot be used."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ExchangeError('%s cannot be used: %s' % (path, error)) from error
    _declare(library, functions, path)
    return library


def _declare(library, functions, path):
    try:
        for name, types in functions.items():
            getattr(library, name).argtypes = types or None
    except AttributeError as error:
        raise ExchangeError('%s cannot be used: %s' % (path, error)) from error
