"""A cache of OpenCL programs: each is built once, for all functions, all devices of one type, and all processes.

Theano builds the kernels of each op again for each function, and OpenCL drivers are slow at it: of the 55 s in which
the training function of a VGG-16 was compiled for PoCL, 51 s were 1,231 builds of 141 different sources. Here, a
context that has built a source uses its program again, and another context loads the binary.

This is for tests alone, since it rewrites the OpenCL driver's dispatch table: the table at the head of each platform
object, in which the OpenCL loader finds the driver's functions, and whose layout the extension cl_khr_icd defines
(Khronos, cl_icd.h). `.ci/quickly` has each process of the tests call `share_programs` before its first OpenCL context,
unless the environment has TEST_OPENCL_CACHE=off. It imports neither theano_mgpu nor Theano.
"""
from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import threading
from typing import Any, Dict, List, Tuple

_logger = logging.getLogger('opencl_programs')

LOADER = 'libOpenCL.so.1'
# Places of clCreateProgramWithSource, clCompileProgram and clLinkProgram in the table, from cl_icd.h.
CREATE, COMPILE, LINK = 26, 98, 99
# From cl.h.
SUCCESS = 0
CONTEXT_DEVICES = 0x1081
DEVICE_NAME, DRIVER_VERSION, DEVICE_VERSION = 0x102B, 0x102D, 0x102F
PROGRAM_BINARY_SIZES, PROGRAM_BINARIES = 0x1165, 0x1166

_pointer, _uint, _text, _int, _size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_pointers, _texts, _code = ctypes.POINTER(_pointer), ctypes.POINTER(_text), ctypes.POINTER(_int)
_Create = ctypes.CFUNCTYPE(_pointer, _pointer, _uint, _pointers, ctypes.POINTER(_size), _code)
_Compile = ctypes.CFUNCTYPE(_int, _pointer, _uint, _pointer, _text, _uint, _pointers, _texts, _pointer, _pointer)
_Link = ctypes.CFUNCTYPE(_pointer, _pointer, _uint, _pointer, _text, _uint, _pointers, _pointer, _pointer, _code)


class ProgramCache:
    """The programs of one OpenCL driver, as libgpuarray makes them by three calls each.

    Parameters
    ----------
    table : ctypes.POINTER(c_void_p)
        One of `driver_tables`.
    folder : str
        The folder in which binaries are kept.

    Attributes
    ----------
    functions : dict of int to ctypes function
        The function for each place of the table that is replaced.
    built, loaded, shared : int
        Programs that were built from source, loaded as a binary, and used again.
    """

    def __init__(self, table: Any, folder: str):
        self._cl = ctypes.CDLL(LOADER)
        self._cl.clCreateProgramWithBinary.restype = _pointer
        self._create, self._compile, self._link = _Create(table[CREATE]), _Compile(table[COMPILE]), _Link(table[LINK])
        self._lock = threading.Lock()  # replicas in threads build kernels at their first calls
        self.functions = {CREATE: _Create(self._locked(self.create)), COMPILE: _Compile(self._locked(self.compile)),
                          LINK: _Link(self._locked(self.link))}
        self._folder = folder
        self._sources: Dict[int, Tuple[int, bytes]] = {}  # program -> (context, source)
        self._headers: Dict[Tuple[int, bytes], int] = {}  # (context, source) -> program that others include
        self._keys: Dict[int, Tuple[int, str]] = {}       # program -> (context, name of its sources)
        self._programs: Dict[Any, int] = {}               # (context, name) -> linked program
        self._binaries: Dict[str, bytes] = {}             # path -> content
        self._link_options: List[Any] = []  # options of the first link, which may be NULL; others should be equal
        self.built = self.loaded = self.shared = 0

    def _locked(self, function):
        """Return a function that one thread at a time calls."""
        def call(*arguments):
            with self._lock:
                return function(*arguments)
        return call

    def create(self, context: int, count: int, strings: Any, lengths: Any, code: Any) -> int:
        """Replace clCreateProgramWithSource: remember the source, and create each header once.

        libgpuarray 0.7.6 creates its header again for every kernel, and never releases it: 24 KB a kernel.
        """
        source = b''.join(ctypes.string_at(strings[i], lengths[i]) if lengths and lengths[i] else
                          ctypes.string_at(strings[i]) for i in range(count))
        header = self._headers.get((context, source))
        if header:
            return self._again(header, code)
        program = self._create(context, count, strings, lengths, code)
        if program and self._device(context):
            self._sources[program] = context, source
            self._keys.pop(program, None)
        return program

    def _again(self, program, code):
        """Return a program that exists, as a function of OpenCL that makes one."""
        self._cl.clRetainProgram(_pointer(program))
        if code:
            code[0] = SUCCESS
        return program

    def compile(self, program: int, n_devices: int, devices: Any, options: bytes | None, n_headers: int, headers: Any,
                names: Any, *callback: Any) -> int:
        """Replace clCompileProgram: do nothing where the linked program is known."""
        key = self._key(program, options, n_headers, headers, names)
        if key:
            self._headers.update((self._sources[headers[i]], headers[i]) for i in range(n_headers))
            self._keys[program] = key
            if key in self._programs or self._load(*key):
                return SUCCESS
        return self._compile(program, n_devices, devices, options, n_headers, headers, names, *callback)

    def link(self, context: int, n_devices: int, devices: Any, options: bytes | None, n_programs: int, programs: Any,
             *rest: Any) -> int:
        """Replace clLinkProgram: return the linked program where it is known."""
        notify, _, code = rest
        key = self._keys.get(programs[0]) if n_programs == 1 and not notify else None
        known = self._programs.get(key)
        if known and [options] == self._link_options:
            self.shared += 1
            return self._again(known, code)
        linked = self._link(context, n_devices, devices, options, n_programs, programs, *rest)
        if linked and key and self._link_options in ([], [options]):
            self._link_options = [options]
            self.built += 1
            self._keep(key, linked)
            self._write(self._path(*key), self._binary(linked))
        return linked

    def _key(self, program, options, n_headers, headers, names):
        """Return the context and the name of a program's sources; None if one of these is not known."""
        if program not in self._sources or any(headers[i] not in self._sources for i in range(n_headers)):
            return None
        context, source = self._sources[program]
        parts = [options or b'', source]
        for i in range(n_headers):
            parts += [names[i], self._sources[headers[i]][1]]
        return context, hashlib.sha256(b'\0'.join(parts)).hexdigest()

    def _keep(self, key, program):
        """Add one more reference to a program: it lives as long as the process."""
        self._cl.clRetainProgram(_pointer(program))
        self._programs[key] = program

    def _load(self, context, name):
        """Load the binary that another context, or process, has built; return whether that worked."""
        binary = self._read(self._path(context, name)) if self._link_options else None
        if not binary:
            return False
        content, size = _text(binary), _size(len(binary))
        device, code = _pointer(self._device(context)), _int()
        program = self._cl.clCreateProgramWithBinary(_pointer(context), 1, ctypes.byref(device), ctypes.byref(size),
                                                     ctypes.byref(content), None, ctypes.byref(code))
        if not program:  # another version of the driver has made the file
            return False
        if self._cl.clBuildProgram(_pointer(program), 0, None, *self._link_options, None, None) == SUCCESS:
            self._keep((context, name), program)
            self.loaded += 1
        self._cl.clReleaseProgram(_pointer(program))
        return (context, name) in self._programs

    def _read(self, path):
        if path not in self._binaries and os.path.exists(path):
            with open(path, 'rb') as file:
                self._binaries[path] = file.read()
        return self._binaries.get(path)

    def _write(self, path, content):
        self._binaries[path] = content
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            unfinished = '%s.%d' % (path, os.getpid())
            with open(unfinished, 'wb') as file:
                file.write(content)
            os.replace(unfinished, path)
        except OSError as error:  # a full disk: the program is there; other processes build it again
            _logger.warning('a compiled OpenCL program could not be kept in %s: %s', self._folder, error)

    def _binary(self, program):
        size = _size()
        self._info('Program', program, PROGRAM_BINARY_SIZES, size)
        content = ctypes.create_string_buffer(size.value)
        self._info('Program', program, PROGRAM_BINARIES, _pointer(ctypes.addressof(content)))
        return content.raw

    def _path(self, context, name):
        """Return the file of a binary for the context's device type, version of driver, and PoCL's further options."""
        device = self._device(context)
        facts = [self._about(device, what) for what in (DEVICE_NAME, DRIVER_VERSION, DEVICE_VERSION)]
        facts += filter(None, [os.environb.get(b'POCL_EXTRA_BUILD_FLAGS')])
        return os.path.join(self._folder, hashlib.sha256(b'\0'.join(facts)).hexdigest()[:16], name)

    def _device(self, context):
        """Return the device of a context; None if it has several."""
        device = _pointer()
        return device.value if self._info('Context', context, CONTEXT_DEVICES, device) == SUCCESS else None

    def _about(self, device, what):
        text = ctypes.create_string_buffer(1024)
        self._info('Device', device, what, text)
        return text.value

    def _info(self, kind, thing, what, result):
        """Ask OpenCL for a fact about an object of a kind; return an error code, and the fact in `result`."""
        return getattr(self._cl, 'clGet%sInfo' % kind)(_pointer(thing), what, _size(ctypes.sizeof(result)),
                                                       ctypes.byref(result), None)


caches: List[ProgramCache] = []  # one for each driver, from the first OpenCL context on


def driver_tables() -> list[Any]:
    """Return the dispatch table of each OpenCL driver of this process, as an array of addresses that can be written to.

    Returns
    -------
    list of ctypes.POINTER(c_void_p)
        Without drivers whose table is read-only: their programs are built as before.
    """
    try:
        library = ctypes.CDLL(LOADER)
    except OSError:  # no OpenCL here, and pygpu says so
        return []
    count = _uint()
    library.clGetPlatformIDs(0, None, ctypes.byref(count))
    platforms: Any = (_pointer * count.value)()
    library.clGetPlatformIDs(count, platforms, None)
    addresses = {ctypes.cast(platform, _pointers)[0] for platform in platforms}
    return [ctypes.cast(address, _pointers) for address in addresses if _is_writable(address)]


def _is_writable(address):
    with open('/proc/self/maps') as maps:
        for line in maps:
            span, access = line.split()[:2]
            start, stop = (int(number, 16) for number in span.split('-'))
            if start <= address < stop:
                return 'w' in access
    return False


def share_programs(folder: str) -> None:
    """Make the OpenCL drivers of this process build each program once, and keep the binaries in a folder."""
    for table in driver_tables() if not caches else ():
        cache = ProgramCache(table, folder)
        for place, function in cache.functions.items():
            table[place] = ctypes.cast(function, _pointer).value
        caches.append(cache)
