"""Places of NVIDIA's libraries: LD_LIBRARY_PATH, the dynamic linker, pip's wheels, conda, NVIDIA's installers."""
from __future__ import annotations

import ctypes
import glob
import os
import re
import subprocess
import sys
import sysconfig
from typing import Any, NamedTuple, Optional, Tuple

MULTIARCH = sysconfig.get_config_var('MULTIARCH') or ''  # the folder of Debian's libraries


class Candidate(NamedTuple):
    """A file that may be a library, and whether it was found on LD_LIBRARY_PATH."""

    path: str
    by_user: bool


class Library(NamedTuple):
    """One of NVIDIA's libraries, as this process uses it."""

    path: Optional[str]         # None if there is none
    version: Tuple[int, ...]    # (12, 9), of CUDA for a driver; empty if unknown
    shim: Optional[str] = None  # the small library that libgpuarray gets when it opens the name, in place of the file
    problem: str = ''
    remedy: str = ''
    detail: str = ''            # what it does here that it does not do elsewhere


def candidates(name: str) -> list[Candidate]:
    """Return the files that may be a library, such as ``libnvrtc.so``, each once, in the order of preference."""
    unique: dict[str, Candidate] = {}
    for path in on_library_path(name):
        unique.setdefault(os.path.realpath(path), Candidate(path, True))
    for path in _linker_cache(name) + installed(name):
        unique.setdefault(os.path.realpath(path), Candidate(path, False))
    return list(unique.values())


def on_library_path(name: str) -> list[str]:
    """Return the files of a library, of any version, in the folders of LD_LIBRARY_PATH."""
    folders = os.environ.get('LD_LIBRARY_PATH', '').split(':')
    return [path for folder in folders if folder for path in files_in(os.path.abspath(folder), name)]


def installed(name: str) -> list[str]:
    """Return the files of a library, of any version, where pip, conda, NVIDIA and distributions install it."""
    folders = _places('lib', 'lib64', ['/usr/lib/wsl/lib', '/run/opengl-driver/lib', '/usr/lib/' + MULTIARCH,
                                       '/usr/lib64', '/usr/lib'])
    return [path for folder in folders for path in files_in(folder, name)]


def files_in(folder: str, name: str) -> list[str]:
    """Return the files of a library in a folder, the unversioned name first.

    ``libnvrtc-builtins.so`` and ``libnvrtc.alt.so`` are other libraries.
    """
    pattern = re.compile(re.escape(name) + r'(\.\d+)*')
    paths = glob.glob(os.path.join(glob.escape(folder), name + '*'))
    return sorted((path for path in paths if pattern.fullmatch(os.path.basename(path))), key=len)


def _linker_cache(name):
    for ldconfig in ('/sbin/ldconfig', '/usr/sbin/ldconfig'):
        if os.path.exists(ldconfig):
            text = subprocess.run([ldconfig, '-p'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  universal_newlines=True).stdout
            return re.findall(r'^\s*%s[.\d]* .*=> (\S.*)$' % re.escape(name), text, re.M)
    return []  # musl has no cache


def include_folders() -> list[str]:
    """Return the folders where pip, conda, NVIDIA and distributions install the C headers of CUDA."""
    return _places('include', 'include', ['/usr/include/' + MULTIARCH, '/usr/include'])


def _places(name, of_toolkit, of_system):
    """Return the folders of a name that exist, by the names that pip and conda, NVIDIA's toolkit and the system use."""
    # A path entry that is '' is the current folder.
    patterns = [os.path.join(glob.escape(entry or os.curdir), 'nvidia', '*', name) for entry in sys.path]
    for root, folder in ((sys.prefix, name), (os.environ.get('CONDA_PREFIX'), name),
                         (os.environ.get('CUDA_HOME'), of_toolkit), (os.environ.get('CUDA_PATH'), of_toolkit)):
        patterns += ['%s/%s' % (glob.escape(root), below) for below in (folder, 'targets/*/' + name) if root]
    for root in ('/usr/local/cuda*', '/opt/cuda'):
        patterns += ['%s/%s' % (root, below) for below in (of_toolkit, 'targets/*/' + name)]
    return [os.path.abspath(folder) for pattern in patterns + of_system for folder in sorted(glob.glob(pattern))]


def loaded(name: str) -> ctypes.CDLL | None:
    """Return the library that ``dlopen(name)`` returns because it is loaded already; None if there is none."""
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL | os.RTLD_NOLOAD)
    except OSError:
        return None


def address(library: Any, function: str) -> int | None:
    """Return the address of a function of a loaded library; raise an AttributeError if there is none of this name."""
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value


def file_of(library: Any, function: str) -> str | None:
    """Return the path of the file that a loaded library has a function from; None if that is not known."""
    class Info(ctypes.Structure):
        _fields_ = [('path', ctypes.c_char_p), ('base', ctypes.c_void_p), ('symbol', ctypes.c_char_p),
                    ('value', ctypes.c_void_p)]
    info = Info()
    known = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address(library, function)), ctypes.byref(info))
    return os.path.abspath(os.fsdecode(info.path)) if known else None


def file_version(path: str) -> tuple[int, ...]:
    """Return the version in the name of a file, or of the file that it is a link to; empty if neither has one.

    >>> file_version('/lib/libcublas.so.12'), file_version('/lib/libcublas.so')
    ((12,), ())
    """
    for name in (path, os.path.realpath(path)):
        numbers = re.search(r'\.so\.([\d.]+)$', name)
        if numbers:
            return tuple(int(number) for number in numbers.group(1).split('.'))
    return ()
