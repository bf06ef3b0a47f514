"""Copies of flat arrays between a device and the host: in the order of its computations, or beside them."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from typing import Any, NamedTuple, Sequence

import theano

from .context_map import Context
from .contexts import gpu_context, primary_context
from .cuda_contexts import stream_of
from .cuda_driver import load_driver

UNTIMED = 2  # the flag of an event without a time


class Piece(NamedTuple):
    """Elements of a device's array with one axis, from `start` on, and their memory on the host."""

    array: Any
    start: int
    here: Any


class HostCopies:
    """Copies in the order of a device's computations: the host waits for each block before the next one is read."""

    is_beside = False

    def __init__(self) -> None:
        self._blocks: list[Sequence[Piece]] = []  # those under way: their arrays live

    def follow(self) -> None:
        """Have the copies begin after all that the device has been given to compute."""

    def read(self, blocks: Sequence[Sequence[Piece]]) -> None:
        """Begin to read blocks of pieces from the device."""
        self._blocks = list(blocks)
        if len(blocks) == 1:
            self._read(0)

    def _read(self, number):
        for array, start, here in self._blocks[number]:
            array[start:start + here.size].read(here)

    def arrive(self, number: int) -> None:
        """Wait until a block is on the host, and let go of its arrays."""
        if len(self._blocks) > 1:
            self._read(number)
        for array, *_ in self._blocks[number]:
            array.sync()
        self._blocks[number] = ()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Begin to write pieces to the device."""
        for array, start, here in pieces:
            array[start:start + here.size].write(here)

    def written(self) -> None:
        """Have the device compute nothing more before the pieces are written."""

    def drop(self) -> None:
        """Let go of the arrays of a failed step, once no copy is under way."""
        self._blocks = []


class CopiesBeside(HostCopies):
    """Copies of a CUDA device on two streams, which libgpuarray does not know.

    It uses freed memory again in the order of its own stream. So an array that is read has to live until it arrives,
    and an array that is written has to be allocated before `follow`, and to live until `written`.
    """

    is_beside = True

    def __init__(self, context: Context, n_blocks: int) -> None:
        super().__init__()
        self._context, (self._out, self._in) = context, _streams(context)
        self._computes = stream_of(gpu_context(context))
        with _current(context):
            events = [_event() for _ in range(1 + n_blocks)]
        self._event, *self._events = events  # the latter of the blocks
        weakref.finalize(self, _destroy, context, events).atexit = False

    def follow(self) -> None:
        with _current(self._context) as call:
            call('cuEventRecord', self._event, self._computes)
            for stream in (self._out, self._in):
                call('cuStreamWaitEvent', stream, self._event, 0)

    def read(self, blocks: Sequence[Sequence[Piece]]) -> None:
        self.follow()
        self._blocks = list(blocks)
        with _current(self._context) as call:
            for block, event in zip(blocks, self._events):
                for array, start, here in block:
                    call('cuMemcpyDtoHAsync_v2', here.ctypes.data, array.gpudata + start * here.itemsize, here.nbytes,
                         self._out)
                call('cuEventRecord', event, self._out)

    def arrive(self, number: int) -> None:
        with _current(self._context) as call:
            call('cuEventSynchronize', self._events[number])
        self._blocks[number] = ()

    def write(self, pieces: Sequence[Piece]) -> None:
        with _current(self._context) as call:
            for array, start, here in pieces:
                call('cuMemcpyHtoDAsync_v2', array.gpudata + start * here.itemsize, here.ctypes.data, here.nbytes,
                     self._in)

    def written(self) -> None:
        with _current(self._context) as call:
            call('cuEventRecord', self._event, self._in)
            call('cuStreamWaitEvent', self._computes, self._event, 0)

    def drop(self) -> None:
        with _current(self._context) as call:
            for stream in (self._out, self._in):
                with contextlib.suppress(RuntimeError):  # a lost device copies nothing more
                    call('cuStreamSynchronize', stream)
        super().drop()


def copies_of(context: Context, n_blocks: int) -> HostCopies:
    """Return new copies of a context: beside its computations, if it can and there are several blocks."""
    is_beside = context.kind == 'cuda' and n_blocks > 1 and theano.config.gpuarray.single_stream
    return CopiesBeside(context, n_blocks) if is_beside else HostCopies()


@functools.lru_cache(maxsize=None)
def _streams(context):
    return [load_driver().stream(primary_context(context)) for _ in range(2)]


def _event():
    handle = ctypes.c_void_p()
    load_driver().call('cuEventCreate', ctypes.byref(handle), UNTIMED)
    return handle


def _destroy(context, events):
    """Give events back to the driver, which frees each once its copies are done."""
    with _current(context) as call, contextlib.suppress(RuntimeError):
        for event in events:
            call('cuEventDestroy_v2', event)


def _current(context):
    """Return a ``with`` block in which a context is current, which gives the function that calls the driver."""
    return load_driver().current(primary_context(context))
