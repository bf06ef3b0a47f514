"""The choice of a cuDNN that suits the driver, with its headers, and a check that a convolution compiles and computes.

Theano compiles its own C code against cuDNN. So the headers are needed, too, and a folder with a library that is named
``libcudnn.so``, which pip's wheels lack.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Tuple

from . import search, shims
from .versions import Version, cudnn_problem, cudnn_remedy, cudnn_version, dotted

SHIM = Path(__file__).with_name('cudnn_shim.h').read_text(encoding='utf-8')  # before C code that calls cuDNN
CHECK = Path(__file__).with_name('cudnn_check.cpp')
OWN_HEADERS = str(Path(__file__).with_name('cuda_headers'))
# A folder of CUDA's headers has all of these: pip's wheels of the CUDA runtime lack the last one.
CUDA_HEADERS = ('cuda.h', 'cuda_runtime.h', 'cuda_runtime_api.h', os.path.join('crt', 'host_defines.h'))
WORKSPACE = 8 << 20  # bytes
TOLERANCE = 1e-2     # TF32 keeps 3 digits; a wrong kernel keeps none


class Cudnn(NamedTuple):
    """A cuDNN as this process uses it, or the problem with it, and a remedy."""

    path: Optional[str]
    version: Version = ()   # (9, 28, 0); empty if unknown
    number: int = 0         # as cuDNN writes it: 92800
    include: str = ''       # the folder of its headers
    cuda_include: str = ''  # the folder of CUDA's headers
    link: str = ''          # the folder of a library that is named libcudnn.so
    check: Any = None       # the compiled cudnn_check.cpp, a ctypes.CDLL
    problem: str = ''
    remedy: str = ''

    def why_not(self) -> str:
        """Return why it cannot be used, and what to do, in one line; '' if it can be used."""
        return ' '.join('. '.join(filter(None, [self.problem, self.remedy])).split())

    def trial(self, handle: int, gpu_context: Any) -> str:
        """Compute a small convolution and its two gradients on a device, by cuDNN's handle for the context.
        """
        import numpy as np
        from pygpu import gpuarray

        from ...utils.values import wrong
        rng = np.random.RandomState(0)
        x, w, dy = (rng.rand(*shape).astype('float32') for shape in ((1, 2, 6, 6), (3, 2, 3, 3), (1, 3, 4, 4)))
        expected = _convolve(x, w, dy)
        inputs = [gpuarray.array(value, context=gpu_context) for value in (x, w, dy)]
        outputs = [gpuarray.zeros(value.shape, 'float32', context=gpu_context) for value in expected]
        workspace = gpuarray.zeros((WORKSPACE,), 'int8', context=gpu_context)
        for array in inputs + outputs + [workspace]:
            array.sync()
        addresses = [ctypes.c_void_p(array.gpudata) for array in
                     (inputs[0], inputs[1], outputs[0], inputs[2], outputs[1], outputs[2], workspace)]
        where = ctypes.c_char_p()
        self.check.theano_mgpu_convolve.restype = ctypes.c_char_p
        with gpu_context:
            error = self.check.theano_mgpu_convolve(ctypes.c_void_p(handle), *addresses, ctypes.c_size_t(WORKSPACE),
                                                    ctypes.byref(where))
            failed = ctypes.CDLL('libcuda.so').cuCtxSynchronize()
        if error is not None:
            return 'a convolution fails: %s of %s' % (error.decode(), (where.value or b'').decode().partition('(')[0])
        if failed:
            return 'a convolution fails: error %d of the driver' % failed
        errors = [wrong(np.asarray(array), value, 0, TOLERANCE) for array, value in zip(outputs, expected)]
        return next(('a convolution ' + error for error in errors if error), '')


def provide(driver: Version, capabilities: Sequence[Version], flags: Any) -> Cudnn:
    """Choose cuDNN and its headers, load it, and check that a convolution compiles against it.

    Return the first one that suits the CUDA version of the driver, and the compute capability of each device. If none
    does, it has a problem that names the reason for each. `flags` is ``theano.config``.
    """
    paths, problems = _files(flags.dnn.library_path), []
    for path in paths:
        try:
            return _usable(path, driver, capabilities, flags)
        except shims.Unusable as error:
            problems.append(error.args)
    if not paths:
        return Cudnn(None, problem='cuDNN is not installed', remedy=cudnn_remedy(driver))
    return Cudnn(paths[0], problem='; '.join(problem for problem, _ in problems), remedy=problems[0][1])


def _files(folder):
    """Return the files that may be cuDNN: in the flag's folder, then on LD_LIBRARY_PATH, then the newest."""
    others = sorted(search.candidates('libcudnn.so'), reverse=True,
                    key=lambda candidate: (candidate.by_user, search.file_version(candidate.path)))
    paths = (search.files_in(folder, 'libcudnn.so') if folder else []) + [candidate.path for candidate in others]
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def _usable(path, driver, capabilities, flags):
    """Load a file, and find its headers; raise `shims.Unusable` if a convolution cannot be compiled."""
    remedy = cudnn_remedy(driver)
    try:
        library = ctypes.CDLL(path)
        for function in (library.cudnnGetVersion, library.cudnnGetCudartVersion):
            function.restype = ctypes.c_size_t
        number, runtime = library.cudnnGetVersion(), library.cudnnGetCudartVersion()
    except (OSError, AttributeError) as error:
        raise shims.Unusable('cuDNN cannot be loaded: %s' % error, remedy) from error
    version = cudnn_version(number)
    problem = cudnn_problem(path, version, runtime // 1000, driver, capabilities)
    if problem:
        raise shims.Unusable(problem, remedy)
    folders = {folder: header_version(folder) for folder in _include_folders(path, flags.dnn.include_path)}
    include = next((folder for folder in folders if folders[folder] == version), None)
    if include is None:
        others = ', '.join('%s has the headers of %s' % (folder, dotted(other))
                           for folder, other in folders.items() if other)
        raise shims.Unusable('the headers of cuDNN %s (%s) are not installed%s'
                             % (dotted(version), path, '; ' + others if others else ''), remedy)
    try:
        link = shims.link_folder(path, 'libcudnn.so')
    except OSError as error:
        raise shims.Unusable('a link to %s cannot be made: %s' % (path, error), shims.OTHER_FOLDER) from error
    for cuda_include in _cuda_include_folders(flags.cuda.include_path):
        try:
            check = ctypes.CDLL(_build_check(path, include, cuda_include))
            return Cudnn(path, version, number, include, cuda_include, link, check)
        except (shims.Unusable, OSError) as error:
            problem = 'Theano cannot be compiled with cuDNN %s (%s): %s' % (dotted(version), path, error.args[0])
    raise shims.Unusable(problem, remedy)


def _build_check(path, include, cuda_include):
    """Compile and link all functions of cuDNN that Theano's convolutions call; return the path of the library."""
    text = SHIM + CHECK.read_text(encoding='utf-8')
    options = ['-x', 'c++', '-w', '-Wl,--no-undefined', '-I' + include, '-I' + cuda_include]
    return shims.build('libtheano_mgpu_cudnn.so', text, path, options)


def _include_folders(path: str, flag: str) -> Iterator[str]:
    if flag:
        yield flag
    for name in (path, os.path.realpath(path)):
        folder = os.path.dirname(os.path.abspath(name))
        yield os.path.join(os.path.dirname(folder), 'include')
        yield os.path.join(os.path.dirname(os.path.dirname(folder)), 'include')
    yield from search.include_folders()


def _cuda_include_folders(flag: str) -> list[str]:
    """Return folders of CUDA's headers: the flag's, the first complete one, and the few names that are needed."""
    complete = [folder for folder in search.include_folders()
                if all(os.path.exists(os.path.join(folder, name)) for name in CUDA_HEADERS)]
    return [flag] * bool(flag) + complete[:1] + [OWN_HEADERS]


def header_version(folder: str) -> Version:
    """Return the version of cuDNN's headers in a folder; empty if there are none."""
    for name in ('cudnn_version.h', 'cudnn.h'):  # the first one exists since cuDNN 8
        with contextlib.suppress(OSError):
            text = Path(folder, name).read_text(encoding='utf-8', errors='replace')
            numbers = [re.search(r'#define CUDNN_%s\s+(\d+)' % part, text) for part in ('MAJOR', 'MINOR', 'PATCHLEVEL')]
            if all(numbers):
                return tuple(int(number.group(1)) for number in numbers if number)
    return ()


def _convolve(x: Any, w: Any, dy: Any) -> Tuple[Any, Any, Any]:
    """Return the cross-correlation of images and filters, and its gradients by the images and by the filters."""
    import numpy as np
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    height, width = dy.shape[2:]
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            rows, columns = slice(i, i + height), slice(j, j + width)
            y += np.einsum('bchw,fc->bfhw', x[:, :, rows, columns], w[:, :, i, j])
            dx[:, :, rows, columns] += np.einsum('bfhw,fc->bchw', dy, w[:, :, i, j])
            dw[:, :, i, j] = np.einsum('bfhw,bchw->fc', dy, x[:, :, rows, columns])
    return y, dx, dw
