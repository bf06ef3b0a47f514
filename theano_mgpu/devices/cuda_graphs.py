"""CUDA graphs: what a call enqueues on a device's stream, recorded once, and launched as a whole from then on.

CUDA records the work that is enqueued on a stream between ``cuStreamBeginCapture`` and ``cuStreamEndCapture``,
instead of running it (docs.nvidia.com, CUDA Driver API, "Stream Management" and "Graph Management"). A graph has the
addresses of its recording for good. What libgpuarray 0.7 does meanwhile (``src/gpuarray_buffer_cuda.c``,
``gpuarray_blas_cuda_cublas.c``):

- It allocates from its own list of free blocks, by cuMemAlloc where that has none, which a capture refuses. A freed
  block serves the next array, of anybody. So while a call is recorded, its arrays lie in the context's `GraphMemory`,
  whose blocks nobody else gets: libgpuarray's ``cuda_make_buf`` makes arrays there. One memory serves all graphs of a
  context, since their launches follow each other on one stream.
- With ``GA_CTX_SINGLE_STREAM`` (Theano's default) it neither records events nor waits for them, and each copy, kernel
  and cuBLAS call is on the one stream. cuBLAS and cuDNN have it as the stream of their handles.
- A copy to the device would read the host's memory at each launch, when it has other content, or none: also where
  ``GA_BUFFER_INIT`` has an array filled, as for the pointers of batched products. Such values lie in page-locked
  memory of the graph instead, where a caller can change them.
- A read from the device, a wait and a copy between devices cannot be recorded. They fail, with the reason. But after a
  look-up of rows, libgpuarray reads whether an index was out of bounds: that may be read after the launch.

cuda_graphs.cpp does this by a table of functions over the table of `cuda_contexts`. Other threads wait meanwhile
(`cuda_contexts.alone`): what they enqueue on the stream would become a part of the graph.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np
import theano

from ..errors import ExchangeError
from ..utils.attributes import collector_paused
from . import cuda_contexts, page_locked
from .context_map import Context
from .contexts import gpu_context, primary_context
from .cuda_driver import ADDRESS, INTEGER, SIZE, load_driver

SOURCE = Path(__file__).with_suffix('.cpp')
FUNCTIONS: dict[str, list[Any]] = {
    'cuStreamBeginCapture_v2': [ADDRESS, INTEGER], 'cuStreamEndCapture': [ADDRESS, ADDRESS],
    'cuGraphInstantiateWithFlags': [ADDRESS, ADDRESS, ctypes.c_ulonglong], 'cuGraphLaunch': [ADDRESS, ADDRESS],
    'cuGraphDestroy': [ADDRESS], 'cuGraphExecDestroy': [ADDRESS]}
COMPUTED, CAPTURED = 1, 2  # modes of cuda_graphs.cpp
THREAD_LOCAL = 1  # a mode of a capture: calls of other threads are allowed


class CannotCapture(Exception):
    """A call that cannot become a graph; the text says why."""


class GraphMemory:
    """The memory of all graphs of a context, and its stream; see `memory_of_graphs`."""

    def __init__(self, context: Context) -> None:
        self.context, self.gpu = context, gpu_context(context)
        self.driver, self.library = load_driver(), _library()
        self.stream = cuda_contexts.stream_of(self.gpu)
        _memories[self.gpu.ptr] = self
        if not self.library.add_arena(self.gpu.ptr, cuda_contexts.extension(b'cuda_make_buf'), _drop_graphs):
            raise ExchangeError('too many contexts are open')
        self.is_short = False  # whether memory has been short once: there are no graphs then
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that have graphs, with a method `give_back`

    def compute(self, run: Callable[[], None]) -> int:
        """Run a call whose arrays lie in the memory; return the bytes of page-locked memory that its copies would take.
        """
        with cuda_contexts.alone(self.gpu):
            self.library.begin(self.gpu.ptr, COMPUTED, None, 0)
            try:
                run()
            finally:
                self.library.end(self.gpu.ptr)
        return self.staged()

    def capture(self, run: Callable[[], None], staging: np.ndarray) -> Graph:
        """Record a call, whose arrays lie in the memory, as a graph; raise a CannotCapture if it cannot be one.

        It copies from `staging`, page-locked memory, instead of from arrays of the host.
        """
        made, failed = ADDRESS(), None
        with collector_paused(), cuda_contexts.alone(self.gpu), self.current() as call:
            self.library.begin(self.gpu.ptr, CAPTURED, staging.ctypes.data, staging.nbytes)
            try:
                call('cuStreamBeginCapture_v2', self.stream, THREAD_LOCAL)
                run()
            except Exception as error:
                failed = error
            finally:
                code = self.driver.function('cuStreamEndCapture')(self.stream, ctypes.byref(made))
                why = self.library.end(self.gpu.ptr)
            try:
                if why or failed or code:
                    raise CannotCapture(why.decode() if why else str(failed or self.driver.text_of(code)))
                return Graph(self, made, staging)
            finally:
                if made:
                    call('cuGraphDestroy', made)

    def staged(self) -> int:
        """Return the bytes of page-locked memory that a call takes for copies, so far."""
        return int(self.library.staged(self.gpu.ptr))

    def n_arrays(self) -> int:
        """Return the number of arrays in the memory."""
        return int(self.library.n_used(self.gpu.ptr))

    def page_locked(self, size: int) -> np.ndarray:
        """Return page-locked memory of some bytes for copies of a graph."""
        return page_locked.zeros(size, 'uint8', [self.context])

    def current(self) -> Any:
        """Return a ``with`` block in which the context is current, which gives the function that calls the driver."""
        return self.driver.current(primary_context(self.context))

    def destroy(self, executable: Any, event: Any) -> None:
        """Free a graph, once its last launch has run."""
        with self.current() as call, contextlib.suppress(RuntimeError):  # the device may be lost
            call('cuEventSynchronize', event)
            call('cuGraphExecDestroy', executable)
            call('cuEventDestroy_v2', event)


class Graph:
    """A graph of a context, made of what was captured, with the page-locked memory that it copies from."""

    def __init__(self, memory: GraphMemory, captured: Any, staging: np.ndarray) -> None:
        self._memory, self.staging = memory, staging
        with memory.current():
            self._executable = memory.driver.address_by('cuGraphInstantiateWithFlags', captured, 0)
        self._event = memory.driver.event(primary_context(memory.context))  # the end of its launches
        self.finds_errors = bool(memory.library.finds_errors(memory.gpu.ptr))  # it reads if an index is out of bounds
        weakref.finalize(self, memory.destroy, self._executable, self._event).atexit = False

    def launch(self) -> None:
        """Compute it, after all that the stream has been given."""
        memory = self._memory
        with memory.current():
            for name, handle in ('cuGraphLaunch', self._executable), ('cuEventRecord', self._event):
                function = memory.driver.function(name)
                memory.driver.check(name, cuda_contexts.on_stream(memory.gpu, function, handle, memory.stream))

    def wait(self) -> None:
        """Wait for the last launch: what it copies to the device may be changed then."""
        with self._memory.current() as call:
            call('cuEventSynchronize', self._event)

    def takes_error(self) -> bool:
        """Return whether its last launch, or one before, has found an index out of bounds; wait for it."""
        self.wait()
        return bool(self._memory.library.take_error(self._memory.gpu.ptr))


_memories: dict[int, GraphMemory] = {}  # by the address of the context
_opening = threading.Lock()     # functions of several contexts begin on several threads


@ctypes.CFUNCTYPE(INTEGER, ADDRESS)
def _drop_graphs(context):
    """Drop the graphs of a context, where an array has no memory; say whether there were any."""
    memory = _memories[context]
    memory.is_short, users = True, list(memory.users)
    for each in users:
        each.give_back()
    return len(users)


@functools.lru_cache(maxsize=None)
def memory_of_graphs(context: Context) -> GraphMemory | str:
    """Return the memory of a context; or why it has no graphs."""
    if not theano.config.gpuarray.single_stream:
        return 'gpuarray.single_stream=False'
    try:
        with _opening:
            load_driver().declare(FUNCTIONS)
            return _memories.get(gpu_context(context).ptr) or GraphMemory(context)
    except Exception as error:  # Theano raises a bare Exception for the errors of a compiler
        return str(error).partition('\n')[0]


class Result:
    """A new array on a context's device, for a result of graphs, of a `layout`."""

    def __init__(self, context: Context, layout: tuple[Any, ...]) -> None:
        from pygpu import gpuarray
        shape, dtype, order = layout
        self.array = gpuarray.empty(shape, dtype, order=order, context=gpu_context(context))
        self.struct = _struct_of(self.array)

    def fill(self, value: Any) -> None:
        """Copy another array of the context to it, unless it is the same one."""
        array = self.array
        if value.shape != array.shape:  # pygpu would repeat it
            raise CannotCapture('its results have another shape in each call')
        if (value.gpudata, value.strides) != (array.gpudata, array.strides):
            if not value.ndim:
                array, value = array.reshape((1,)), value.reshape((1,))  # pygpu assigns no array without axes
            array[...] = value


class Choices:
    """Arrays for some results, several for each."""

    def __init__(self, results: Sequence[Sequence[Result]]) -> None:
        self._all = [each for several in results for each in several]
        ends = [0, *itertools.accumulate(map(len, results))]
        self._spans = list(zip(ends, ends[1:]))
        self._structs = (ADDRESS * len(self._all))(*(each.struct for each in self._all))
        self._are_free, self._find = ctypes.create_string_buffer(len(self._all)), _library().find_free

    def free(self) -> list[Result | None]:
        """Return the first array for each result that nobody else holds, not even a view of it; None without one."""
        self._find(self._structs, len(self._all), self._are_free)
        are_free = self._are_free.raw
        places = [are_free.find(1, *span) for span in self._spans]
        return [self._all[place] if place >= 0 else None for place in places]


def layout(array: Any) -> tuple[Any, ...]:
    """Return the shape, the dtype and the order of an array: cuBLAS takes a matrix in 'F' as transposed, and may round
    otherwise.
    """
    return array.shape, array.dtype, 'F' if array.flags.f_contiguous and not array.flags.c_contiguous else 'C'


def _struct_of(array):
    """Return the address of libgpuarray's struct of an array: the first word of it that leads to memory in its context.

    A GpuArray begins as each object of Cython with methods in C does, then follows `GpuArray` (gpuarray/array.h), whose
    first word it is.
    """
    words = (ADDRESS * 4).from_address(id(array))
    for word in words[2:]:
        if word and tuple((ADDRESS * 2).from_address(word)) == (array.gpudata - array.offset, array.context.ptr):
            return word
    raise CannotCapture('pygpu has another layout than 0.7')


@functools.lru_cache(maxsize=None)
def _library():
    from ..utils import native
    library = ctypes.CDLL(native.build(SOURCE, headers=[cuda_contexts.HEADER]))
    for function, types, result in (
            (library.begin, [ADDRESS, INTEGER, ADDRESS, SIZE], None),
            (library.end, [ADDRESS], ctypes.c_char_p), (library.staged, [ADDRESS], SIZE),
            (library.finds_errors, [ADDRESS], INTEGER), (library.take_error, [ADDRESS], INTEGER),
            (library.n_used, [ADDRESS], SIZE), (library.find_free, [ADDRESS, SIZE, ADDRESS], None),
            (library.add_arena, [ADDRESS, ADDRESS, ctypes.CFUNCTYPE(INTEGER, ADDRESS)], INTEGER)):
        function.argtypes, function.restype = types, result
    return library
