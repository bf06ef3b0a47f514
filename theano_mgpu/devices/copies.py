"""Copies of arrays between a device and the host: in the order of its computations, or beside them."""
from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, NamedTuple, Sequence

import numpy as np
import theano

from ..utils import processor
from ..utils.executors import ThreadsExecutor
from . import page_locked
from .context_map import Context
from .contexts import gpu_context, primary_context
from .cuda_contexts import on_stream, stream_of
from .cuda_driver import load_driver

# Bytes of an input that is copied beside: a smaller one the driver stages at once, and a larger one would take much
# memory of the host from others. Bytes that a thread copies on the host, and the most threads.
LEAST, MOST, PIECE, FILLERS = 1 << 16, 1 << 28, 1 << 20, 4


class Elements(NamedTuple):
    """Elements of a device's array with one axis, from `start` on, and their memory on the host."""

    array: Any
    start: int
    here: Any


class HostCopies:
    """Copies in the order of a device's computations: the host waits for each block before the next one is read."""

    is_beside = False

    def __init__(self) -> None:
        self._blocks: list[Sequence[Elements]] = []  # those under way: their arrays live

    def follow(self) -> None:
        """Have the copies begin after all that the device has been given to compute."""

    def read(self, blocks: Sequence[Sequence[Elements]]) -> None:
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

    def write(self, pieces: Sequence[Elements]) -> None:
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
        events = [load_driver().event(primary_context(context)) for _ in range(1 + n_blocks)]
        self._event, *self._events = events  # the latter of the blocks
        weakref.finalize(self, _destroy, context, events).atexit = False

    def follow(self) -> None:
        _on_stream(self._context, 'cuEventRecord', self._event, self._computes)
        with _current(self._context) as call:
            for stream in (self._out, self._in):
                call('cuStreamWaitEvent', stream, self._event, 0)

    def read(self, blocks: Sequence[Sequence[Elements]]) -> None:
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

    def write(self, pieces: Sequence[Elements]) -> None:
        with _current(self._context) as call:
            for array, start, here in pieces:
                call('cuMemcpyHtoDAsync_v2', array.gpudata + start * here.itemsize, here.ctypes.data, here.nbytes,
                     self._in)

    def written(self) -> None:
        with _current(self._context) as call:
            call('cuEventRecord', self._event, self._in)
        _on_stream(self._context, 'cuStreamWaitEvent', self._computes, self._event)

    def drop(self) -> None:
        with _current(self._context) as call:
            for stream in (self._out, self._in):
                with contextlib.suppress(RuntimeError):  # a lost device copies nothing more
                    call('cuStreamSynchronize', stream)
        super().drop()


class _Input(NamedTuple):
    """The memory of an input, in bytes on the host and flat on the device, its last value there, and its last copy."""

    here: np.ndarray
    there: Any
    array: Any
    copied: int  # event


class InputsBeside:
    """Memory of inputs on a CUDA device, written through page-locked memory, beside what the device computes.

    A value in other memory would be copied more slowly, and the host would wait for the device first. Computations that
    read the values have to be enqueued in a ``with`` block of this object. They wait for the values, and the next
    values for them.
    """

    def __init__(self, context: Context) -> None:
        self._context, (_, self._in) = context, _streams(context)
        self._computes = stream_of(gpu_context(context))
        self._inputs: dict[Any, _Input] = {}
        self._underway, self._events = 0, [self._event()]  # the first event: of the computations that have read
        weakref.finalize(self, _destroy, context, self._events).atexit = False

    def _event(self):
        return load_driver().event(primary_context(self._context))

    def send(self, key: Any, value: np.ndarray) -> Any:
        """Begin to copy a value, which may be changed at once; return its array, until the next value of the key.

        Return None if the host has too little memory whose pages can be locked.
        """
        given = self._inputs.get(key)
        with _current(self._context) as call:
            if given is not None:
                call('cuEventSynchronize', given.copied)
            given = self._with_room(given, value)
            if given is None:
                return None
            self._inputs[key] = given
            _fill(given.here[:value.nbytes].view(value.dtype).reshape(value.shape), value)
            call('cuStreamWaitEvent', self._in, self._events[0], 0)
            call('cuMemcpyHtoDAsync_v2', given.array.gpudata, given.here.ctypes.data, value.nbytes, self._in)
            call('cuEventRecord', given.copied, self._in)
        self._underway = given.copied
        return given.array

    def _with_room(self, given, value):
        """Return the memory of an input, or new memory where a value is too large for it."""
        here, there, array, copied = given or (np.empty(0, 'uint8'), None, None, 0)
        if here.nbytes < value.nbytes:
            here = page_locked.memory(max(value.nbytes, here.nbytes * 5 // 4), [self._context])
            if here is None:
                return None
        if there is None or there.dtype != value.dtype or there.size < value.size:
            from pygpu import gpuarray  # not installed on every machine without a GPU
            there, array = gpuarray.empty((value.size,), value.dtype, context=gpu_context(self._context)), None
            self._follow()  # libgpuarray gives memory again that the device may still use
        if array is None or array.shape != value.shape:
            array = there[:value.size].reshape(value.shape)
        if not copied:
            copied = self._event()
            self._events.append(copied)
        return _Input(here, there, array, copied)

    def __enter__(self) -> None:
        if self._underway:
            _on_stream(self._context, 'cuStreamWaitEvent', self._computes, self._underway)
            self._underway = 0

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self._inputs:
            with contextlib.suppress(*[RuntimeError] if kind else []):  # a lost device has failed before
                self._follow()

    def _follow(self):
        """Have the next values wait for what the device was given to compute so far."""
        _on_stream(self._context, 'cuEventRecord', self._events[0], self._computes)

    def close(self) -> None:
        """Have the device use the memory for nothing else before it is written; a lost device writes no more."""
        with contextlib.suppress(RuntimeError):
            self.__enter__()


def inputs_beside(context: Context) -> InputsBeside | None:
    """Return new memory of inputs that are copied beside what a context computes; None where it cannot be."""
    return InputsBeside(context) if context.kind == 'cuda' and theano.config.gpuarray.single_stream else None


def _fill(to: np.ndarray, value: np.ndarray) -> None:
    """Copy a value on the host, a large one by several threads."""
    n = min(len(value), value.nbytes // PIECE, _fillers())
    if n < 2:
        np.copyto(to, value)
    else:
        pieces = zip(np.array_split(to, n), np.array_split(value, n))
        _threads().run([functools.partial(np.copyto, *each) for each in pieces])


@functools.lru_cache(maxsize=None)
def _fillers():
    return min(FILLERS, processor.cores())


@functools.lru_cache(maxsize=None)
def _threads():
    return ThreadsExecutor(_fillers())


def copies_of(context: Context, n_blocks: int) -> HostCopies:
    """Return new copies of a context: beside its computations, if it can and there are several blocks."""
    is_beside = context.kind == 'cuda' and n_blocks > 1 and theano.config.gpuarray.single_stream
    return CopiesBeside(context, n_blocks) if is_beside else HostCopies()


@functools.lru_cache(maxsize=None)
def _streams(context):
    return [load_driver().stream(primary_context(context)) for _ in range(2)]


def _destroy(context, events):
    """Give events back to the driver, which frees each once its copies are done."""
    with _current(context) as call, contextlib.suppress(RuntimeError):
        for event in events:
            call('cuEventDestroy_v2', event)


def _on_stream(context, name, *handles):
    """Call a function of the driver, one of whose two handles is the stream on which a context computes."""
    driver = load_driver()
    with driver.current(primary_context(context)):
        driver.check(name, on_stream(gpu_context(context), driver.function(name), *handles))


def _current(context):
    """Return a ``with`` block in which a context is current, which gives the function that calls the driver."""
    return load_driver().current(primary_context(context))
