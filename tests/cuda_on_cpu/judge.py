"""Compilation of kernels with NVIDIA's own compiler, NVRTC, which needs neither a GPU nor a driver.

The stand-in compiles kernels with g++, which accepts code that NVRTC may refuse. `make test-nvrtc` has the tests write
the source of each kernel to a folder (CUDA_ON_CPU_SOURCES), and this program compile all of them.
"""
import argparse
import collections
import ctypes
import glob
import os
import sys

from tqdm import tqdm

EPILOG = """\
example:
  python tests/cuda_on_cpu/judge.py build/kernels build/nvrtc/cu12/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
      prints how many kernels compile for each compute capability, and the first errors of those that do not

The exit status is 1 where a kernel does not compile, or where there is none.
"""


class Nvrtc:
    """NVIDIA's runtime compiler.

    Parameters
    ----------
    path : str
        Of libnvrtc.so.N, from the packages nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13).

    Attributes
    ----------
    version : str
    """

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = '%d.%d' % (major.value, minor.value)

    def errors(self, source, headers, architecture):
        """Compile a kernel.

        Parameters
        ----------
        source : bytes
        headers : dict of bytes to bytes
            Texts of the files that it may include, by name.
        architecture : str
            For example ``'compute_75'``.

        Returns
        -------
        list of str
            The compiler's errors; empty where the kernel compiles.
        """
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        names = (ctypes.c_char_p * len(headers))(*headers)
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        options = (ctypes.c_char_p * 1)(b'-arch=' + architecture.encode())
        self._library.nvrtcCreateProgram(ctypes.byref(program), source, b'kernel.cu', len(headers), texts, names)
        status = self._library.nvrtcCompileProgram(program, 1, options)
        self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._library.nvrtcGetProgramLog(program, log)
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        if not status:
            return []
        return [line for line in log.value.decode().splitlines() if 'error' in line] or ['status %d' % status]


def read(path):
    with open(path, 'rb') as file:
        return file.read()


def judge(folder, library, architectures):
    """Compile every kernel of a folder for each architecture, and print the errors.

    Returns
    -------
    bool
        Whether there were kernels, and all compiled.
    """
    nvrtc = Nvrtc(library)
    paths = sorted(glob.glob(os.path.join(folder, '*.cu')))
    headers = {os.path.basename(path).encode(): read(path) for path in glob.glob(os.path.join(folder, '*'))
               if path not in paths}
    if not paths:
        print('%s has no kernel: run the tests on the stand-in with CUDA_ON_CPU_SOURCES=%s' % (folder, folder))
        return False
    failed = collections.defaultdict(list)  # errors -> kernels
    for architecture in architectures:
        count = 0
        for path in tqdm(paths, desc='NVRTC %s, %s' % (nvrtc.version, architecture), disable=None, leave=False):
            errors = nvrtc.errors(read(path), headers, architecture)
            count += not errors
            if errors:
                failed[architecture, errors[0]].append(os.path.basename(path))
        print('NVRTC %s, %s: %d of %d kernels compile' % (nvrtc.version, architecture, count, len(paths)), flush=True)
    for (architecture, error), names in failed.items():
        print('  %s, %d kernels (%s ...): %s' % (architecture, len(names), names[0], error))
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='of the sources, as CUDA_ON_CPU_SOURCES named it')
    parser.add_argument('library', help='libnvrtc.so.N')
    parser.add_argument('architectures', nargs='*', default=['compute_75', 'compute_90', 'compute_120'],
                        metavar='compute_XX', help='(default: compute_75 compute_90 compute_120)')
    arguments = parser.parse_args()
    return 0 if judge(arguments.folder, arguments.library, arguments.architectures) else 1


if __name__ == '__main__':
    sys.exit(main())
