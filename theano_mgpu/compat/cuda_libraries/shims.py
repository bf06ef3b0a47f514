"""Small shared libraries, compiled on this machine, that stand in front of NVIDIA's under the names libgpuarray opens.

``dlopen('libcublas.so')`` returns a library that is already loaded if that is its SONAME, and ``dlsym`` also searches
the libraries that it is linked with. So a library without any code, with the SONAME ``libcublas.so`` and linked with
``libcublas.so.12``, is all that libgpuarray needs. NVRTC's has code: it corrects the architecture option. cuBLAS's
has code where products are to be TF32.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Sequence

from ...utils.files import whole_file
from ...utils.pointers import pointers
from . import search

# The functions that libgpuarray 0.7.6 takes from NVRTC, in the order of `functions` below.
NVRTC_FUNCTIONS = ('nvrtcCreateProgram', 'nvrtcCompileProgram', 'nvrtcDestroyProgram', 'nvrtcGetProgramLog',
                   'nvrtcGetProgramLogSize', 'nvrtcGetPTX', 'nvrtcGetPTXSize', 'nvrtcGetErrorString')

CUBLAS_FUNCTIONS = 'cublasCreate_v2', 'cublasSetMathMode'

COMPILERS = 'Debian: apt-get install g++ python3-dev. Another compiler: THEANO_FLAGS=cxx=/path/to/g++'
OTHER_FOLDER = 'Choose another folder: THEANO_FLAGS=base_compiledir=/path/to/folder'
EMPTY = '/* No code: only a name, and the library that it is linked with. */\n'
NVRTC, CUBLAS = Path(__file__).with_name('nvrtc_shim.c'), Path(__file__).with_name('cublas_shim.c')


class Unusable(Exception):
    """A library cannot be used, or not be compiled; the arguments are the reason and the remedy."""


def compiler() -> str:
    """Return the compiler that Theano uses, else one on the PATH; raise Unusable if there is none."""
    for name in (_theano_flag('cxx', ''), 'c++', 'g++', 'gcc', 'cc'):
        if name and shutil.which(name):
            return name
    raise Unusable('CUDA devices need a C compiler, and there is none: the flag cxx of Theano is empty, and none of '
                   'c++, g++, gcc and cc is on the PATH', COMPILERS)


def folder() -> str:
    """Return the folder of the shims, in Theano's folder of compiled code; it may be deleted at any time."""
    return os.path.join(_theano_flag('base_compiledir', os.path.expanduser('~/.theano')), 'cuda_libraries')


def build(name: str, text: str, linked_with: str | None = None, options: Sequence[str] = ('-x', 'c')) -> str:
    """Compile a library of this file name and SONAME in `folder`, or find it compiled; return its path.

    The text is C, unless the options name another language. Several processes may build it at once. Raise Unusable
    if there is no compiler, it fails, or the folder cannot be written.
    """
    stamp = os.stat(linked_with).st_mtime_ns if linked_with else 0
    key = hashlib.sha256(repr((name, text, linked_with, stamp, *options)).encode()).hexdigest()[:24]
    path = os.path.join(folder(), key, name)
    if os.path.exists(path):
        return path
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with whole_file(path) as unfinished:
            _compile(unfinished, name, text, linked_with, options)
    except OSError as error:
        raise Unusable('%s, which CUDA devices need, could not be written: %s' % (name, error),
                       OTHER_FOLDER) from error
    return path


def link_folder(path: str, name: str) -> str:
    """Return a folder that has a library under another name, for a linker: ``-lcudnn`` finds ``libcudnn.so`` alone.

    An empty library that is linked with it, as `build` makes for libgpuarray, is no help: linkers may leave it out. The
    folder has the library under its own name, too, which compiled code asks for. Raise an OSError if it cannot be
    written.
    """
    real = os.path.realpath(path)
    links = os.path.join(folder(), hashlib.sha256(repr((real, name)).encode()).hexdigest()[:24])
    os.makedirs(links, exist_ok=True)
    for link in (name, os.path.basename(path)):
        link = os.path.join(links, link)
        if not os.path.exists(link):
            unfinished = '%s.%d' % (link, os.getpid())
            os.symlink(real, unfinished)
            os.replace(unfinished, link)
    return links


def _compile(path, name, text, linked_with, options):
    command = [compiler(), *options, '-shared', '-fPIC', '-O1', '-Wl,-soname,' + name, '-o', path, '-']
    if linked_with:
        # By default distributions link only libraries that are used, and none is used here.
        command += ['-x', 'none', '-Wl,--no-as-needed', linked_with]
    done = subprocess.run(command, input=text, universal_newlines=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if re.search('error:|undefined|cannot find', line)]
        raise Unusable('%s could not build %s, which CUDA devices need: %s'
                       % (command[0], name, ' '.join((errors[:1] or [done.stdout])[0].split())[:400]), COMPILERS)


def connect_nvrtc(shim: Any, nvrtc: Any, driver: Any, architectures: Sequence[int]) -> None:
    """Connect the loaded shim of NVRTC with the real one, to which it passes calls on."""
    functions = pointers(search.address(nvrtc, name) for name in NVRTC_FUNCTIONS)
    shim.theano_mgpu_connect.restype = None
    shim.theano_mgpu_connect(functions, ctypes.c_void_p(search.address(driver, 'cuCtxGetDevice')),
                             ctypes.c_void_p(search.address(driver, 'cuDeviceGetAttribute')),
                             (ctypes.c_int * len(architectures))(*architectures), len(architectures))


def connect_cublas(shim: Any, cublas: Any) -> None:
    """Connect the loaded shim of cuBLAS with the real one, whose handles it sets to TF32."""
    shim.theano_mgpu_connect.restype = None
    shim.theano_mgpu_connect(*(ctypes.c_void_p(search.address(cublas, name)) for name in CUBLAS_FUNCTIONS))


def _theano_flag(name, default):
    """Return a flag of Theano; `default` where Theano cannot be imported, as the doctor has to work there too."""
    try:
        import theano
        return getattr(theano.config, name)
    except Exception:
        return default
