"""The choice of a cuDNN that suits the driver, with its headers, and a check that a convolution compiles and computes.

Theano compiles its own C code against cuDNN. So the headers are needed, too, and a folder with a library that is named
``libcudnn.so``, which pip's wheels lack.
"""
from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Tuple

from . import search, shims
from .search import Candidate
from .versions import Version, cudnn_problem, cudnn_remedy, cudnn_version, dotted

SHIM = Path(__file__).with_name('cudnn_shim.h').read_text(encoding='utf-8')  # before C code that calls cuDNN
CHECK = Path(__file__).with_name('cudnn_check.cpp')
OWN_HEADERS = str(Path(__file__).with_name('cuda_headers'))
# A folder of CUDA's headers has all of these: pip's wheels of the CUDA runtime lack the last one.
CUDA_HEADERS = ('cuda.h', 'cuda_runtime.h', 'cuda_runtime_api.h', os.path.join('crt', 'host_defines.h'))
WORKSPACE = 8 << 20  # bytes
TOLERANCE = 1e-2     # TF32 keeps 3 digits; a wrong kernel keeps none


class Flags(NamedTuple):
    """Theano's flags ``dnn.include_path``, ``dnn.library_path`` and ``cuda.include_path``; '' where not set."""

    include: str = ''
    library: str = ''
    cuda_include: str = ''


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


def provide(driver: Version, capabilities: Sequence[Version], flags: Flags) -> Cudnn:
    """Choose cuDNN and its headers, load it, and check that a convolution compiles against it.

    Return the first one that suits the CUDA version of the driver, and the compute capability of each device. If none
    does, it has a problem that names the reason for each.
    """
    candidates = _candidates(flags)
    if not candidates:
        return Cudnn(None, problem='cuDNN is not installed', remedy=cudnn_remedy(driver))
    problems = []
    for candidate in candidates:
        cudnn = _try_library(candidate.path, driver, capabilities, flags)
        if not cudnn.problem:
            return cudnn
        problems.append(cudnn)
    return problems[0]._replace(problem='; '.join(cudnn.problem for cudnn in problems))


def _candidates(flags):
    """Return the files that may be cuDNN: the flag's folder, then LD_LIBRARY_PATH, then the newest."""
    flagged = [Candidate(path, True) for path in search.files_in(flags.library, 'libcudnn.so')] if flags.library else []
    others = sorted(search.candidates('libcudnn.so'), reverse=True,
                    key=lambda candidate: (candidate.by_user, search.file_version(candidate.path)))
    unique = {os.path.realpath(candidate.path): candidate for candidate in reversed(flagged + others)}
    return list(unique.values())[::-1]


def _try_library(path, driver, capabilities, flags):
    try:
        library = ctypes.CDLL(path)
        for function in (library.cudnnGetVersion, library.cudnnGetCudartVersion):
            function.restype = ctypes.c_size_t
        number, runtime = library.cudnnGetVersion(), library.cudnnGetCudartVersion()
    except (OSError, AttributeError) as error:
        return Cudnn(path, problem='cuDNN cannot be loaded: %s' % error, remedy=cudnn_remedy(driver))
    version = cudnn_version(number)
    cudnn = Cudnn(path, version, number)
    problem = cudnn_problem(path, version, runtime // 1000, driver, capabilities)
    if problem:
        return cudnn._replace(problem=problem, remedy=cudnn_remedy(driver))
    folders = list(_include_folders(path, flags))
    include = next((folder for folder in folders if header_version(folder) == version), None)
    if include is None:
        others = ', '.join('%s has the headers of %s' % (folder, dotted(header_version(folder)))
                           for folder in folders if header_version(folder))
        return cudnn._replace(problem='the headers of cuDNN %s (%s) are not installed%s'
                              % (dotted(version), path, '; ' + others if others else ''),
                              remedy=cudnn_remedy(driver))
    try:
        cudnn = cudnn._replace(include=include, link=shims.link_folder(path, 'libcudnn.so'))
    except OSError as error:
        return cudnn._replace(problem='a link to %s cannot be made: %s' % (path, error), remedy=shims.OTHER_FOLDER)
    for cuda_include in _cuda_include_folders(flags):
        try:
            check = ctypes.CDLL(_build_check(cudnn, cuda_include))
        except (shims.Unbuildable, OSError) as error:
            cudnn = cudnn._replace(problem='Theano cannot be compiled with cuDNN %s (%s): %s'
                                   % (dotted(version), path, error.args[0]), remedy=cudnn_remedy(driver))
        else:
            return cudnn._replace(cuda_include=cuda_include, check=check, problem='', remedy='')
    return cudnn


def _build_check(cudnn, cuda_include):
    """Compile and link all functions of cuDNN that Theano's convolutions call; return the path of the library."""
    text = SHIM + CHECK.read_text(encoding='utf-8')
    options = ['-x', 'c++', '-w', '-Wl,--no-undefined', '-I' + cudnn.include, '-I' + cuda_include]
    return shims.build('libtheano_mgpu_cudnn.so', text, cudnn.path, options)


def _include_folders(path: str, flags: Flags) -> Iterator[str]:
    if flags.include:
        yield flags.include
    for name in (path, os.path.realpath(path)):
        folder = os.path.dirname(os.path.abspath(name))
        yield os.path.join(os.path.dirname(folder), 'include')
        yield os.path.join(os.path.dirname(os.path.dirname(folder)), 'include')
    yield from search.include_folders()


def _cuda_include_folders(flags: Flags) -> Iterator[str]:
    """Yield folders of CUDA's headers: the flag's, the first complete one, and the few names that are needed."""
    if flags.cuda_include:
        yield flags.cuda_include
    for folder in search.include_folders():
        if all(os.path.exists(os.path.join(folder, name)) for name in CUDA_HEADERS):
            yield folder
            break
    yield OWN_HEADERS


def header_version(folder: str) -> Version:
    """Return the version of cuDNN's headers in a folder; empty if there are none."""
    for name in ('cudnn_version.h', 'cudnn.h'):  # the first one exists since cuDNN 8
        try:
            text = Path(folder, name).read_text(encoding='utf-8', errors='replace')
        except OSError:
            continue
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
