"""The choice of an NVRTC that suits the driver and the devices, with a shim in front of it."""
from __future__ import annotations

import ctypes
import functools
from typing import Any, Sequence

from . import search, shims
from .search import Library
from .versions import architectures_of, dotted, nvrtc_problem, remedy


def provide(driver: Any, driver_version: tuple[int, ...],
            capabilities: Sequence[tuple[int, int]]) -> tuple[Library, Sequence[int]]:
    """Choose and load NVRTC, and make ``dlopen('libnvrtc.so')`` return the shim.

    It is the one that supports the most devices. Return the Library, which has a problem if it suits neither the driver
    nor any device, and the architectures that it compiles for.
    """
    there = search.loaded('libnvrtc.so')
    if there is not None and not hasattr(there, 'theano_mgpu_connect'):
        return _as_loaded(there, capabilities)
    candidates = search.candidates('libnvrtc.so')
    if not candidates:
        return Library(None, (), None, 'NVRTC, which compiles the kernels for CUDA devices, is not installed',
                       remedy(driver_version)), ()
    # The shim goes first: dlopen returns the first library of a name, and NVRTC's own SONAME may be this one.
    shim_path = shims.build('libnvrtc.so', shims.NVRTC.read_text(encoding='utf-8'))
    shim = ctypes.CDLL(shim_path)
    usable, errors = [], []
    for candidate in candidates:
        try:
            nvrtc = ctypes.CDLL(candidate.path)
            version, architectures = version_of(nvrtc), supported_by(nvrtc)
        except (OSError, AttributeError) as error:
            errors.append(str(error))
            continue
        problem_of = functools.partial(nvrtc_problem, candidate.path, version, architectures, driver_version)
        rank = (sum(not problem_of([each]) for each in capabilities), candidate.by_user, version)
        usable.append((rank, candidate.path, version, architectures, nvrtc, problem_of(capabilities)))
    if not usable:
        return Library(candidates[0].path, (), None, 'NVRTC cannot be loaded: ' + '; '.join(errors),
                       remedy(driver_version)), ()
    _, path, version, architectures, nvrtc, problem = max(usable, key=lambda each: each[0])
    shims.connect_nvrtc(shim, nvrtc, driver, architectures)
    return Library(path, version, shim_path, problem, remedy(driver_version) if problem else ''), architectures


def _as_loaded(nvrtc, capabilities):
    """Leave the NVRTC that this process has loaded under the name before: libgpuarray may have opened it already."""
    path, version = search.file_of(nvrtc, 'nvrtcVersion'), version_of(nvrtc)
    if max(capabilities) < (10, 0):
        return Library(path, version), supported_by(nvrtc)
    return Library(path, version, None, '%s was loaded as libnvrtc.so before theano_mgpu could correct how libgpuarray '
                   'calls it; without that nothing compiles for compute capability %s'
                   % (path, dotted(max(capabilities))), 'Import theano_mgpu before theano and pygpu'), ()


def version_of(nvrtc: Any) -> tuple[int, int]:
    """Return the version of a loaded NVRTC: ``(12, 9)``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def supported_by(nvrtc: Any) -> list[int]:
    """Return the architectures that a loaded NVRTC compiles for, ascending: ``[75, 80, ...]``."""
    if not hasattr(nvrtc, 'nvrtcGetSupportedArchs'):  # before CUDA 11.2
        return architectures_of(version_of(nvrtc))
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    listed = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(listed)
    return sorted(listed)
