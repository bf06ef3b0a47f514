"""Where NVIDIA's libraries may be: what the user says, the dynamic linker, pip's wheels, conda, NVIDIA's installers."""
import ctypes
import glob
import os
import re
import subprocess
import sys
import sysconfig
from collections import namedtuple

Candidate = namedtuple('Candidate', 'path by_user')


def candidates(name):
    """Files that may be a library, in the order of preference.

    Parameters
    ----------
    name : str
        The unversioned name, ``libnvrtc.so``.

    Returns
    -------
    list of Candidate
        `by_user`: found on LD_LIBRARY_PATH. Each file is listed once, whatever links lead to it.
    """
    found = [Candidate(path, True) for path in on_library_path(name)]
    found += [Candidate(path, False) for path in _linker_cache(name) + installed(name)]
    unique = {}
    for candidate in found:
        unique.setdefault(os.path.realpath(candidate.path), candidate)
    return list(unique.values())


def on_library_path(name):
    """Files of a library, of any version, in the folders of LD_LIBRARY_PATH."""
    folders = os.environ.get('LD_LIBRARY_PATH', '').split(':')
    return [path for folder in folders if folder for path in _files(os.path.abspath(folder), name)]


def installed(name):
    """Files of a library, of any version, where pip, conda, NVIDIA and distributions install it."""
    return [path for folder in _folders() for path in _files(folder, name)]


def _files(folder, name):
    """Files of a library in a folder, the unversioned name first.

    ``libnvrtc-builtins.so`` and ``libnvrtc.alt.so`` are other libraries.
    """
    pattern = re.compile(re.escape(name) + r'(\.\d+)*')
    found = glob.glob(os.path.join(glob.escape(folder), name + '*'))
    return sorted((path for path in found if pattern.fullmatch(os.path.basename(path))), key=len)


def _linker_cache(name):
    """Paths that the dynamic linker's cache has for a library, of any version."""
    for ldconfig in ('/sbin/ldconfig', '/usr/sbin/ldconfig'):
        if os.path.exists(ldconfig):
            text = subprocess.run([ldconfig, '-p'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  universal_newlines=True).stdout
            return re.findall(r'^\s*%s[.\d]* .*=> (\S.*)$' % re.escape(name), text, re.M)
    return []  # musl has no cache


def _folders():
    # A path entry that is '' is the current folder.
    patterns = [os.path.join(glob.escape(entry or os.curdir), 'nvidia', '*', 'lib') for entry in sys.path]
    for root in filter(None, (sys.prefix, os.environ.get('CONDA_PREFIX'))):
        patterns += [glob.escape(root) + '/lib', glob.escape(root) + '/targets/*/lib']
    for root in filter(None, (os.environ.get('CUDA_HOME'), os.environ.get('CUDA_PATH'))):
        patterns += [glob.escape(root) + '/lib64', glob.escape(root) + '/targets/*/lib']
    patterns += ['/usr/local/cuda*/lib64', '/usr/local/cuda*/targets/*/lib', '/opt/cuda/lib64',
                 '/opt/cuda/targets/*/lib', '/usr/lib/wsl/lib', '/run/opengl-driver/lib',
                 '/usr/lib/' + (sysconfig.get_config_var('MULTIARCH') or ''), '/usr/lib64', '/usr/lib']
    return [os.path.abspath(folder) for pattern in patterns for folder in sorted(glob.glob(pattern))]


def loaded(name):
    """The library that ``dlopen(name)`` returns because it is loaded already; None if there is none."""
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL | os.RTLD_NOLOAD)
    except OSError:
        return None


def address(library, function):
    """Address of a function of a loaded library; an AttributeError if it has none of this name."""
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value


def file_of(library, function):
    """Path of the file that a loaded library has a function from; None if the dynamic linker does not say."""
    class Info(ctypes.Structure):
        _fields_ = [('path', ctypes.c_char_p), ('base', ctypes.c_void_p), ('symbol', ctypes.c_char_p),
                    ('value', ctypes.c_void_p)]
    info = Info()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address(library, function)), ctypes.byref(info))
    return os.path.abspath(os.fsdecode(info.path)) if found else None


def file_version(path):
    """Version in the name of a file, or of the file that it is a link to; empty if neither has one.

    Examples
    --------
    >>> file_version('/lib/libcublas.so.12'), file_version('/lib/libcublas.so')
    ((12,), ())
    """
    for name in (path, os.path.realpath(path)):
        numbers = re.search(r'\.so\.([\d.]+)$', name)
        if numbers:
            return tuple(int(number) for number in numbers.group(1).split('.'))
    return ()
