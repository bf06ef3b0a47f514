"""Memory that this process and its forks share."""
from __future__ import annotations

import collections
import ctypes
import mmap
import os
import threading
import weakref
from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np

ALIGNED = 64  # bytes: a line of the cache
SMALL = 4096  # bytes of an array that is sent within a message
NO_RESERVE = 0x4000  # of mmap on Linux: pages that are never touched take no memory
MOVE_TO = 3          # of mremap: to an address, in place of what lies there


class ArenaFull(MemoryError):
    """The arena has no room for an array."""


class Place(NamedTuple):
    """The place of an array in an arena."""

    offset: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: str


class Arena:
    """A part of the address space whose pages this process and all later forks share.

    Blocks are allocated by this process alone. A block is free again once no array and no view of one has it. In a fork
    of the script, which must not see further changes, `leave` makes the memory private.

    Parameters
    ----------
    size : int, optional
        Bytes; by default, the memory of the machine, or as much of it as can be reserved.
    """

    def __init__(self, size: int | None = None) -> None:
        self._map, self._used = _mapped(size or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')), 0
        self.size = len(self._map)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._free: dict[int, list[int]] = {}  # size of blocks -> where they begin
        # By the id of a weak reference to a block: the reference, the size, the beginning, and whether it lasts.
        self._blocks: dict[int, Any] = {}
        self._ended: collections.deque[Any] = collections.deque()  # references to blocks that no array has any more
        self._saved = 0, 0  # the address and the size of a copy for forks of the script
        self._lock = threading.RLock()  # a collection may allocate within an allocation

    def empty(self, shape: Sequence[int], dtype: Any, lasts: bool = True) -> np.ndarray:
        """Return a new array without content; raise an ArenaFull if there is no room.

        One that does not last, for a copy or within a step, loses its content in a fork of the script.
        """
        dtype = np.dtype(dtype)
        n_bytes = int(np.prod(shape, dtype='int64')) * dtype.itemsize
        size = _rounded(n_bytes)
        with self._lock:
            while self._ended:
                _, old_size, old, _ = self._blocks.pop(id(self._ended.popleft()))
                self._free.setdefault(old_size, []).append(old)
            free = self._free.get(size)
            if free:
                offset = free.pop()
            elif self._used + size > self.size:
                raise ArenaFull('the memory that contexts of the CPU share is full: %d of %d bytes are in use, and an '
                                'array needs %d' % (self._used, self.size, n_bytes))
            else:
                offset, self._used = self._used, self._used + size
        block = (ctypes.c_char * max(n_bytes, 1)).from_buffer(self._map, offset)  # NumPy keeps it for all views
        # No code in Python runs when it is freed: there, Ctrl-C would be lost, and a fork of the script might wait.
        reference = weakref.ref(block, self._ended.append)
        self._blocks[id(reference)] = reference, size, offset, lasts
        return np.ndarray(shape, dtype, buffer=block)

    def copied(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of an array."""
        copy = self.empty(array.shape, array.dtype, lasts=False)
        copy[...] = array
        return copy

    def with_array(self, value: Any) -> Any:
        """Return a large array as it is if it lies here, else a copy of it here; another value as it is."""
        return self.copied(value) if is_large(value) and self.place_of(value) is None else value

    def save(self) -> None:
        """Copy the arrays that last, for forks of the script; they share the copy until one writes to it."""
        size = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        is_new = self._saved[1] != size
        if is_new:
            self.forget()
            self._saved = _system('mmap', 0, size, mmap.PROT_READ | mmap.PROT_WRITE,
                                  mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1, 0) if size else 0, size
        for block, size, offset, lasts in list(self._blocks.values()):
            if lasts and block() is not None:
                copy, value = [_words(address + offset, size) for address in (self._saved[0], self._begin)]
                if is_new or not np.array_equal(copy, value):  # a page that is written is not shared any more
                    copy[:] = value

    def forget(self) -> None:
        """Free the copy for forks of the script, if there is one."""
        if self._saved[1]:
            _system('munmap', *self._saved)
        self._saved = 0, 0

    def leave(self) -> None:
        """Have the saved copy of the arrays at their addresses, in a fork of the script."""
        self._lock, (address, self.size), self._saved = threading.RLock(), self._saved, (0, 0)
        if self.size:
            _system('mremap', address, self.size, self.size, MOVE_TO, self._begin)

    def place_of(self, array: np.ndarray) -> Place | None:
        """Return the place of an array; None if it lies elsewhere."""
        offset = array.__array_interface__['data'][0] - self._begin
        return Place(offset, array.shape, array.strides, array.dtype.str) if 0 <= offset < self.size else None

    def array_at(self, place: Place) -> np.ndarray:
        """Return the array at a place, in this process or another one."""
        return np.ndarray(place.shape, place.dtype, self._map, place.offset, place.strides)


def _words(address, size):
    """Return an array of the memory at an address."""
    return np.frombuffer((ctypes.c_char * size).from_address(address), 'uint64')


def _system(name, *arguments):
    """Call a function of the C library that changes the address space; Python's mmap can give no address."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * len(arguments)
    result = function(*arguments)
    if result == ctypes.c_size_t(-1).value:
        raise OSError(ctypes.get_errno(), '%s: %s' % (name, os.strerror(ctypes.get_errno())))
    return result or 0


def _mapped(size):
    """Return new memory of a size, or an eighth of the memory that the system grants if that is less.

    The process needs the rest: OpenBLAS tries for ever to get memory that a limit of the address space refuses.
    """
    memory = _granted(size)
    if len(memory) == size:
        return memory
    size = max(len(memory) // 8 & -mmap.PAGESIZE, mmap.PAGESIZE)
    memory.close()
    return _granted(size)


def _granted(size):
    """Return new memory of a size, or of a half, a quarter and so on of it where the system grants no more."""
    while True:
        try:
            return mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except OSError as error:
            size = size // 2 & -mmap.PAGESIZE
            if not size:
                raise ArenaFull('no memory can be shared by processes: %s' % error) from error


def is_large(value: Any) -> bool:
    """Return whether a value goes through an arena; others are sent within messages."""
    return type(value) is np.ndarray and value.nbytes > SMALL and not value.dtype.hasobject


def _rounded(n_bytes):
    """Return the size of a block for some bytes: at most an eighth more, so that blocks fit later arrays, too.

    >>> _rounded(0), _rounded(65), _rounded(1000), _rounded(1025)
    (64, 128, 1024, 1152)
    """
    step = max(ALIGNED, 1 << max(int(n_bytes - 1).bit_length() - 4, 0))
    return max(-(-n_bytes // step) * step, ALIGNED)
