"""The shared libraries that libgpuarray opens by name, and how to give them the names it wants."""
import ctypes
import ctypes.util
import glob
import os
import shlex
import sys
import sysconfig

# libgpuarray 0.7.6 opens these unversioned names: name -> (what wants it, where it comes from).
CUDA_LIBRARIES = {
    'libcuda.so': ('every CUDA call', "It comes with NVIDIA's driver: install that one"),
    'libnvrtc.so': ('every GPU kernel', 'pip install nvidia-cuda-nvrtc-cu12, then run this again'),
    'libcublas.so': ('gemm', 'pip install nvidia-cublas-cu12, then run this again'),
    'libnccl.so': ('pygpu.collectives', ''),
}
OPTIONAL = {'libnccl.so'}
LINKS = '~/.local/lib/theano-mgpu'
LINK = """\
libgpuarray opens it by exactly this name, and here it is {found}. Give it that name, then start again:
  mkdir -p {links}
  ln -sf {found} {links}/{name}
  export LD_LIBRARY_PATH={links}{folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"""


def load_error(name):
    """Why the dynamic linker cannot open a library by this name, as text; None if it can."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return None


def nvidia_gpu_present():
    """Whether this machine has an NVIDIA GPU with its driver (Linux, or WSL)."""
    return any(glob.glob(pattern) for pattern in ('/dev/nvidia[0-9]*', '/proc/driver/nvidia/gpus/*',
                                                  '/usr/lib/wsl/lib/libcuda.so*'))


def library_folders():
    """Folders where pip's and the system's CUDA packages put their libraries; some may not exist."""
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    patterns = [os.path.join(glob.escape(entry), 'nvidia', '*', 'lib') for entry in sys.path if entry]
    patterns += ['/usr/local/cuda*/lib64', '/opt/cuda/lib64', '/usr/lib/' + multiarch, '/usr/lib64',
                 '/usr/lib/wsl/lib']
    return [folder for pattern in patterns for folder in sorted(glob.glob(pattern))]


def find_versioned(name):
    """Where a library is under a name that libgpuarray does not try, ``libcublas.so.12`` say.

    Returns
    -------
    str or None
        A path; a bare file name if only the dynamic linker's cache knows it; None if it is nowhere.
    """
    for folder in library_folders():
        found = sorted(glob.glob(os.path.join(glob.escape(folder), name + '*')), key=len)
        if found:
            return found[0]
    return ctypes.util.find_library(name[len('lib'):-len('.so')])


def remedy(name):
    """What to do about a CUDA library that cannot be opened."""
    found = find_versioned(name)
    if found is None:
        return CUDA_LIBRARIES[name][1]
    if os.path.isabs(found):
        # Its neighbours (libcublasLt.so.12) must be found too.
        folder, found = ':' + shlex.quote(os.path.dirname(found)), shlex.quote(found)
    else:
        folder, found = '', '"$(/sbin/ldconfig -p | sed -n \'s/.*%s .*=> //p\' | head -n 1)"' % found
    return LINK.format(name=name, found=found, folder=folder, links=LINKS)
