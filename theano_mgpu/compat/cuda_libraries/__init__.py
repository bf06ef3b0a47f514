"""NVIDIA's libraries, wherever they are installed, under the names that libgpuarray and Theano open.

libgpuarray 0.7.6 opens ``libcuda.so``, ``libnvrtc.so``, ``libcublas.so`` and ``libnccl.so``. The drivers in containers
and pip's wheels have ``libcuda.so.1``, ``libnvrtc.so.12`` and so on: `provide` closes the gap.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ...errors import ContextError
from ...utils import progress
from ...utils.flag_text import own_flag
from . import cudnn_choice, nvrtc, search, shims
from .search import Library, candidates
from .versions import architecture_for, cublas_problem, dotted, nccl_version, nvrtc_problem, remedy

LIBRARIES = ('libcuda.so', 'libnvrtc.so', 'libcublas.so', 'libnccl.so')
TF32 = (11, 0)  # the first version of cuBLAS that has it
NOT_READY = 802  # an error of the driver
NO_FABRIC = ('A machine with NVSwitch needs the fabric manager, in the version of the driver. As root: systemctl '
             'enable --now nvidia-fabricmanager')
NO_DEVICE = 'Does nvidia-smi list a GPU? A container has to be started with its GPUs (docker run --gpus all)'
REQUIRED = LIBRARIES[:3]  # Theano opens no context without cuBLAS; NCCL is for sums between devices


class Survey(NamedTuple):
    """The result of `survey`."""

    capabilities: List[Tuple[int, int]]  # of the devices, in CUDA's order: (8, 6)
    architectures: Sequence[int]         # for which NVRTC compiles: 75, 80, ..., 120
    libraries: Dict[str, Library]        # by 'libcuda.so' and so on; none without a driver


def provide() -> None:
    """Make NVIDIA's libraries known by the names that libgpuarray opens; call it before libgpuarray uses CUDA.

    Without a driver it does nothing, and libgpuarray gives its own reason. Raise a ContextError if the driver has no
    device, or NVRTC or cuBLAS is missing or suits none.
    """
    for name in REQUIRED:
        library = survey().libraries.get(name)
        if library and library.problem:
            raise ContextError('%s. %s' % (library.problem, library.remedy))


def require(device: str) -> None:
    """Provide the libraries, and raise a ContextError if they do not support a device any more.

    It is left for libgpuarray to report that a device does not exist.
    """
    provide()
    problem = why_not(device)
    if problem:
        raise ContextError('%s: %s. %s' % (device, problem, remedy(survey().libraries['libcuda.so'].version)))


def why_not(device: str) -> str:
    """Return why NVRTC or cuBLAS, which suit other devices, do not support a device; '' if they do, or it is not there.
    """
    capabilities, architectures, libraries = survey()
    number = int(device[len('cuda'):] or 0)
    own = capabilities[number:number + 1]
    if not (own and architectures):
        return ''
    driver, nvrtc, cublas = (libraries[name] for name in REQUIRED)
    return nvrtc_problem(nvrtc.path, nvrtc.version, architectures, driver.version, own) or \
        cublas_problem(cublas.path or '', driver.version, own)


@functools.lru_cache(maxsize=None)
def survey() -> Survey:
    """Find, choose and load NVIDIA's libraries, once in a process."""
    path, driver = _open_driver() if sys.platform.startswith('linux') else (None, None)
    if driver is None:
        return Survey([], (), {})
    version, capabilities, problem = _devices(driver)
    if problem:
        return Survey([], (), {'libcuda.so': Library(path, version, None, '%s: %s' % (path, problem),
                                                     NO_FABRIC if 'error %d' % NOT_READY in problem else NO_DEVICE)})
    try:
        libraries = {'libcuda.so': _named('libcuda.so', path, version, driver, 'cuInit')}
        libraries['libnvrtc.so'], architectures = nvrtc.provide(driver, version, capabilities)
        libraries['libcublas.so'] = _provide_cublas(version, capabilities)
        libraries['libnccl.so'] = _provide_nccl()
    except shims.Unusable as error:  # then the one for NVRTC cannot be built either
        return Survey(capabilities, (), {'libcuda.so': Library(path, version),
                                         'libnvrtc.so': Library(None, (), None, *error.args)})
    return Survey(capabilities, architectures, libraries)


@functools.lru_cache(maxsize=None)
def find_cudnn() -> cudnn_choice.Cudnn:
    """Find, choose, load and check cuDNN, once in a process; Theano has to be imported."""
    import theano
    libraries, capabilities = survey().libraries, survey().capabilities
    if theano.config.dnn.enabled == 'False':
        return cudnn_choice.Cudnn(None, problem='disabled by the flag dnn.enabled')
    if not capabilities:
        return cudnn_choice.Cudnn(None, problem='there is no CUDA device')
    return cudnn_choice.provide(libraries['libcuda.so'].version, capabilities, theano.config)


def _open_driver():
    """Return the driver's path and library; None, None without a driver."""
    # The dynamic linker finds the names without a folder.
    for name in search.on_library_path('libcuda.so') + ['libcuda.so', 'libcuda.so.1'] + search.installed('libcuda.so'):
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL(name)
            return search.file_of(driver, 'cuInit') or name, driver
    return None, None


def _devices(driver):
    """Return the CUDA version that a driver supports, its devices' compute capabilities, and why it has none."""
    number, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()

    def attribute(device, which):
        driver.cuDeviceGetAttribute(ctypes.byref(number), which, device)
        return number.value

    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    error = driver.cuDriverGetVersion(ctypes.byref(number)) or error
    version = (number.value // 1000, number.value % 1000 // 10)
    if error:
        driver.cuGetErrorString(error, ctypes.byref(text))
        return version, [], 'the driver reports error %d, %s' % (error, (text.value or b'unknown').decode())
    capabilities = [(attribute(i, 75), attribute(i, 76)) for i in range(count.value)]
    return version, capabilities, '' if capabilities else 'the driver finds no device'


def _provide_cublas(driver, capabilities):
    def rank(candidate):
        return (sum(not cublas_problem(candidate.path, driver, [each]) for each in capabilities), candidate.by_user,
                search.file_version(candidate.path))

    problems, path = [], None
    for candidate in sorted(candidates('libcublas.so'), key=rank, reverse=True):
        path = path or candidate.path
        problem = cublas_problem(candidate.path, driver, capabilities)
        if not problem:
            try:
                cublas = ctypes.CDLL(candidate.path)
                version = _cublas_version(cublas, candidate.path)
                if own_flag('mgpu.tf32') == 'True':
                    return _with_tf32(candidate.path, version, cublas)
                return _named('libcublas.so', candidate.path, version, cublas, 'cublasCreate_v2')
            except (OSError, AttributeError) as error:
                problem = str(error)
        problems.append(problem)
    return Library(path, (), None, 'cuBLAS, which multiplies matrices on CUDA devices, '
                   + ('cannot be used: ' + '; '.join(problems) if problems else 'is not installed'), remedy(driver))


def _cublas_version(cublas, path):
    with contextlib.suppress(AttributeError):
        numbers = (ctypes.c_int * 2)()
        for part in range(2):
            cublas.cublasGetProperty(part, ctypes.byref(numbers, part * ctypes.sizeof(ctypes.c_int)))
        return tuple(numbers)
    return search.file_version(path)  # before CUDA 8


def _with_tf32(path, version, cublas):
    """Name cuBLAS, and have its handles compute products of float32 as TF32; a note says why, where that is not so."""
    if version < TF32:
        why = '%s is cuBLAS %s, and %s or later has TF32' % (path, dotted(version), dotted(TF32))
    else:
        shim = shims.build('libcublas.so', shims.CUBLAS.read_text(encoding='utf-8'), linked_with=path)
        library = ctypes.CDLL(shim)
        shims.connect_cublas(library, cublas)
        known = search.loaded('libcublas.so')  # asked for now: it would make this the name of a file that has it
        if known and search.address(known, 'cublasCreate_v2') == search.address(library, 'cublasCreate_v2'):
            return Library(path, version, shim, detail='products of float32 as TF32, by mgpu.tf32')
        why = 'another libcublas.so was loaded before'
    progress.note('mgpu.tf32=True: products of matrices stay in float32, since %s' % why)
    return _named('libcublas.so', path, version, cublas, 'cublasCreate_v2')


def _provide_nccl():
    """Load and name NCCL, which adds sums between devices; return a Library."""
    problem, number = 'not found', ctypes.c_int()
    for candidate in candidates('libnccl.so'):
        try:
            nccl = ctypes.CDLL(candidate.path)
            nccl.ncclGetVersion(ctypes.byref(number))
            return _named('libnccl.so', candidate.path, nccl_version(number.value), nccl, 'ncclGetUniqueId')
        except (OSError, AttributeError) as error:
            problem = str(error)
    return Library(None, (), None, problem)


def _named(name, path, version, library, function):
    """Make ``dlopen(name)`` return a library that is loaded; return a Library."""
    known, shim = search.loaded(name), None
    if known is None:
        shim = shims.build(name, shims.EMPTY, linked_with=path)
        known = ctypes.CDLL(shim)
    if search.address(known, function) != search.address(library, function):
        path, version = search.file_of(known, function), ()  # this process had another one loaded by the name
    return Library(path, version, shim)


__all__ = ['LIBRARIES', 'Library', 'Survey', 'architecture_for', 'candidates', 'dotted', 'find_cudnn', 'provide',
           'remedy', 'require', 'survey', 'why_not']
