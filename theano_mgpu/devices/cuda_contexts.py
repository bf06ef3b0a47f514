"""Patches of libgpuarray 0.7: only one of its calls runs in a CUDA context at a time, and leaves it as it was entered.

libgpuarray counts how often a context was entered, and makes it the thread's current one when the count leaves 0. Four
things are wrong with that, in 0.7.0 to 0.7.6 and in later development versions (``src/gpuarray_buffer_cuda.c``):

- ``cuda_newkernel`` does not leave the context when it finds the kernel in its cache, nor after an error of ``get_cc``.
  Once two contexts have leaked, work on the first runs with the second as the current one: memory of the wrong device,
  "CUDA_ERROR_INVALID_HANDLE". A thread that enters a leaked context never gets a current context at all.
- The count has no lock. Python's own does not protect it: copies release that, and Python's garbage collector may free
  an array on any thread.
- ``cuda_transfer`` waits for an event of the source that is not recorded with one stream (Theano's default): the copy
  may begin before the source is computed.
- ``cuda_free`` calls cuMemFree without entering the context, and ignores the error. It does so for each array where no
  freed memory is kept for later ones (Theano's flag ``gpuarray.preallocate=-1``). Memory is then freed only if the
  context is current by chance, as a leaked one is.

Each context has a pointer to a table of functions through which all of libgpuarray, pygpu and Theano call it. `protect`
points it to a table of functions, in cuda_contexts.cpp, that lock the context, call the original, and leave the
context as often as the original failed to. `free_within_context` adds a function that enters the context before it
frees memory. A call that frees memory may wait for all devices, so `keep_apart` keeps it from running while NCCL
launches an exchange.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import Any, Iterator

from ..errors import ContextError

LIBRARY = 'libgpuarray.so.3'
SOURCE, HEADER = Path(__file__).with_suffix('.cpp'), Path(__file__).with_name('libgpuarray.h')


def protect(gpu_context: Any) -> None:
    """Patch one context, unless it is of OpenCL, or patched already; raise a ContextError for another libgpuarray.

    Call it on the thread that opened the context, before other threads use it.
    """
    if gpu_context.kind != b'cuda':
        return
    why_not = library().protect(gpu_context.ptr, *_enter_and_exit())
    if why_not:
        raise ContextError('libgpuarray cannot be used with several CUDA contexts: %s. Install 0.7.6 (Debian: apt-get '
                           'install libgpuarray3 python3-pygpu)' % why_not.decode())
    # An array may be freed, and look into its context, at any time until the end of the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gpu_context))


def free_within_context(gpu_context: Any) -> None:
    """Free memory within its context; does nothing for OpenCL."""
    from theano import config  # this module is imported before Theano
    if gpu_context.kind == b'cuda':
        library().free_within_context(config.gpuarray.preallocate >= 0)


def keep_apart(lock: Any, unlock: Any) -> None:
    """Have calls that free memory, or lock its pages, hold the lock by which NCCL launches an exchange."""
    library().keep_apart(lock, unlock)


def entries(gpu_context: Any) -> int:
    """Return how often libgpuarray has entered a CUDA context without leaving it; -1 where the count is not found.
    """
    return library().entries(gpu_context.ptr, *_enter_and_exit())


@contextlib.contextmanager
def alone(gpu_context: Any) -> Iterator[None]:
    """Have other threads wait before they do anything in a context of CUDA, since this one captures its stream."""
    library().set_captured(gpu_context.ptr, 1)
    try:
        yield
    finally:
        library().set_captured(gpu_context.ptr, 0)


def on_stream(gpu_context: Any, function: Any, *handles: Any) -> int:
    """Call a function of the driver with two handles, one of which is the stream of a CUDA context; return its code.

    While another thread captures the stream, the call waits: it would become a part of the graph.
    """
    return library().on_stream(gpu_context.ptr, function, *handles)


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """Return the functions of cuda_contexts.cpp."""
    from ..utils import native  # imports Theano
    built = ctypes.CDLL(native.build(SOURCE, headers=[HEADER]))
    for function, result in ((built.protect, ctypes.c_char_p), (built.entries, ctypes.c_int)):
        function.argtypes = [ctypes.c_void_p] * 3
        function.restype = result
    built.allocate_host.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    built.free_host.argtypes = built.keep_apart.argtypes = [ctypes.c_void_p] * 2
    built.on_stream.argtypes = [ctypes.c_void_p] * 4
    built.set_captured.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return built


@functools.lru_cache(maxsize=None)
def _enter_and_exit():
    """Return the addresses of libgpuarray's functions cuda_enter and cuda_exit."""
    return extension(b'cuda_enter'), extension(b'cuda_exit')


def extension(name: bytes) -> int:
    """Return the address of one of libgpuarray's functions for CUDA alone."""
    find = ctypes.CDLL(LIBRARY).gpuarray_get_extension
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return find(name)


def stream_of(gpu_context: Any) -> int:
    """Return the address of the stream that libgpuarray, and so Theano, computes on in a CUDA context."""
    get_stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(extension(b'cuda_get_stream'))
    return get_stream(gpu_context.ptr)


def entries_left(gpu_context: Any) -> int:
    """Return the entries into a CUDA context that two compilations of one kernel leave: 0, if libgpuarray is right."""
    from pygpu.gpuarray import GpuArray, GpuKernel
    before = entries(gpu_context)
    for _ in range(2):
        GpuKernel('#include "cluda.h"\nKERNEL void theano_mgpu_probe(GLOBAL_MEM float *x) { x[0] = 1; }',
                  'theano_mgpu_probe', [GpuArray], context=gpu_context)
    return entries(gpu_context) - before
