"""The versions of NVRTC and cuBLAS that suit a driver and its devices, and the way to install them.

A version is a tuple, ``(12, 9)``; the version of a driver is the CUDA version that it supports. The figures are from
NVIDIA's release notes of CUDA, of NVRTC and of the PTX ISA.
"""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

from .search import file_version

Version = Tuple[int, ...]

LOWEST = {9: 30, 10: 30, 11: 35, 12: 50, 13: 75}  # first number of CUDA's version -> the oldest architecture left

# NVRTC lists its architectures from CUDA 11.2 on. Before that: the newest one, and all.
NEWEST: Dict[Version, int] = {(9, 0): 70, (9, 1): 70, (9, 2): 72, (10, 0): 75, (10, 1): 75, (10, 2): 75,
                              (11, 0): 80, (11, 1): 86}
ARCHITECTURES = (30, 32, 35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86)


def architectures_of(nvrtc: Version) -> list[int]:
    """Return the architectures that an NVRTC before CUDA 11.2 compiles for.

    >>> architectures_of((11, 0))
    [35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80]
    """
    return [number for number in ARCHITECTURES
            if LOWEST.get(nvrtc[0], 30) <= number <= NEWEST.get(nvrtc, ARCHITECTURES[-1])]


def is_newer(nvrtc: Version, driver: Version) -> bool:
    """Return whether NVRTC writes a version of PTX that a driver cannot load yet.

    Each version of CUDA has a version of PTX of its own, but for 12.6, which has the one of 12.5.

    >>> is_newer((12, 9), (12, 8)), is_newer((12, 6), (12, 5)), is_newer((12, 9), (13, 0))
    (True, False, False)
    """
    return ((12, 5) if nvrtc == (12, 6) else nvrtc) > driver


def nvrtc_problem(path: str | None, nvrtc: Version, architectures: Sequence[int], driver: Version,
                  capabilities: Sequence[Version]) -> str:
    """Return why NVRTC does not suit the driver, or any of the devices; '' if it does.

    >>> nvrtc_problem('/lib/libnvrtc.so.12', (12, 9), [50, 90], (12, 9), [(8, 6)])
    ''
    >>> nvrtc_problem('/lib/libnvrtc.so.12', (12, 9), [50, 90], (12, 4), [(8, 6)])
    'NVRTC 12.9 (/lib/libnvrtc.so.12) is newer than the driver, which supports CUDA 12.4 and cannot load what this
    NVRTC compiles (compute capability of the devices: 8.6)'
    >>> nvrtc_problem('/lib/libnvrtc.so.13', (13, 0), [75, 90], (13, 0), [(6, 1)])
    'NVRTC 13.0 (/lib/libnvrtc.so.13) compiles for compute capability 7.5 and above, not for 6.1 (the driver supports
    CUDA 13.0)'
    >>> nvrtc_problem('/lib/libnvrtc.so.13', (13, 0), [75, 90], (13, 0), [(6, 1), (8, 6)])
    ''
    """
    name = 'NVRTC %s (%s)' % (dotted(nvrtc), path)
    if is_newer(nvrtc, driver):
        return ('%s is newer than the driver, which supports CUDA %s and cannot load what this NVRTC compiles (compute '
                'capability of the devices: %s)' % (name, dotted(driver), listed(capabilities)))
    if as_number(max(capabilities)) < min(architectures):
        return ('%s compiles for compute capability %s and above, not for %s (the driver supports CUDA %s)'
                % (name, dotted(divmod(min(architectures), 10)), listed(capabilities), dotted(driver)))
    return ''


def architecture_for(capability: Version, architectures: Sequence[int]) -> int:
    """Return the newest architecture that a device of a compute capability runs, as the shim of NVRTC chooses it.

    >>> architecture_for((12, 0), [75, 90, 120]), architecture_for((12, 0), [75, 80, 90])
    (120, 90)
    """
    return max((number for number in architectures if number <= as_number(capability)), default=as_number(capability))


def cublas_problem(path: str, driver: Version, capabilities: Sequence[Version]) -> str:
    """Return why cuBLAS, by the version in its file name, does not suit the driver or any device; '' if it does.

    >>> cublas_problem('/lib/libcublas.so.13', (12, 4), [(8, 6)])
    '/lib/libcublas.so.13 needs a driver that supports CUDA 13; this one supports CUDA 12.4'
    >>> cublas_problem('/lib/libcublas.so.13', (13, 0), [(6, 1)])
    '/lib/libcublas.so.13 supports compute capability 7.5 and above, not 6.1'
    >>> cublas_problem('/lib/libcublas.so.12', (13, 0), [(8, 6), (6, 1)])
    ''
    """
    major = (file_version(path) or (0,))[0]
    if major > driver[0]:
        return '%s needs a driver that supports CUDA %d; this one supports CUDA %s' % (path, major, dotted(driver))
    if as_number(max(capabilities)) < LOWEST.get(major, 0):
        return '%s supports compute capability %s and above, not %s' % (
            path, dotted(divmod(LOWEST[major], 10)), listed(capabilities))
    return ''


def remedy(driver: Version) -> str:
    """Return a command that helps where NVRTC or cuBLAS is missing or does not suit.

    >>> remedy((13, 0))
    "python -m pip install 'theano_mgpu[cuda12]'"
    >>> remedy((12, 4))
    "python -m pip install 'theano_mgpu[cuda12]' 'nvidia-cuda-nvrtc-cu12<12.5', or update the driver"
    >>> remedy((11, 8))
    "python -m pip install 'nvidia-cuda-nvrtc-cu11<11.9' nvidia-cublas-cu11, or update the driver"
    >>> remedy((10, 2))
    "Update the driver, then: python -m pip install 'theano_mgpu[cuda12]'. Or install the CUDA toolkit 10.2"
    """
    if driver >= (12, 9):  # CUDA 12.9 works with every later driver, and supports older devices than CUDA 13 does
        return "python -m pip install 'theano_mgpu[cuda12]'"
    following = '%d.%d' % (driver[0], driver[1] + 1)
    if driver >= (12, 0):
        return ("python -m pip install 'theano_mgpu[cuda12]' 'nvidia-cuda-nvrtc-cu12<%s', or update the driver"
                % following)
    if driver >= (11, 7):  # there are no wheels of older versions
        return "python -m pip install 'nvidia-cuda-nvrtc-cu11<%s' nvidia-cublas-cu11, or update the driver" % following
    return ("Update the driver, then: python -m pip install 'theano_mgpu[cuda12]'. Or install the CUDA toolkit %s"
            % dotted(driver))


def nccl_version(number: int) -> Version:
    """Return the version of NCCL that it writes as one number."""
    return _version(number, 20000)[:2]  # NCCL 2.9 began with five digits


def cudnn_version(number: int) -> Version:
    """Return the version of cuDNN that it writes as one number.

    >>> cudnn_version(92800), cudnn_version(8907), cudnn_version(7605)
    ((9, 28, 0), (8, 9, 7), (7, 6, 5))
    """
    return _version(number, 90000)


def _version(number, longer_from):
    """Return the parts of a version that is one number: the first is before four digits, or three in a short number."""
    factor = 10000 if number >= longer_from else 1000
    return number // factor, number % factor // 100, number % 100


def cudnn_problem(path: str, version: Version, runtime: int, driver: Version, capabilities: Sequence[Version]) -> str:
    """Return why cuDNN does not suit Theano, the driver or any device; '' if it does.

    >>> cudnn_problem('/lib/libcudnn.so.9', (9, 28, 0), 12, (13, 0), [(12, 0)])
    ''
    >>> cudnn_problem('/lib/libcudnn.so.9', (9, 28, 0), 13, (12, 4), [(8, 6)])
    'cuDNN 9.28.0 (/lib/libcudnn.so.9) is for CUDA 13; this driver supports CUDA 12.4'
    >>> cudnn_problem('/lib/libcudnn.so.6', (6, 0, 21), 8, (9, 0), [(7, 0)])
    'cuDNN 6.0.21 (/lib/libcudnn.so.6) is too old: 7.0.2 or later is needed'
    """
    name = 'cuDNN %s (%s)' % (dotted(version), path)
    if version < (7, 0, 2):  # the versions before take hours to load on compute capability 7.0
        return name + ' is too old: 7.0.2 or later is needed'
    if runtime > driver[0]:
        return '%s is for CUDA %d; this driver supports CUDA %s' % (name, runtime, dotted(driver))
    lowest = LOWEST.get(runtime, 30)
    if as_number(max(capabilities)) < lowest:
        return '%s is for compute capability %s and above; the devices have %s' % (
            name, dotted(divmod(lowest, 10)), listed(capabilities))
    return ''


def cudnn_remedy(driver: Version) -> str:
    """Return a command that installs a cuDNN for a driver.

    >>> cudnn_remedy((13, 0))
    "python -m pip install 'theano_mgpu[cudnn12]'"
    >>> cudnn_remedy((10, 2))
    "Update the driver, then: python -m pip install 'theano_mgpu[cudnn12]'. Or install a cuDNN for CUDA 10.2"
    """
    # As for NVRTC and cuBLAS, the libraries for CUDA 12 work with every later driver.
    install = "python -m pip install 'theano_mgpu[cudnn12]'"
    return install if driver >= (12, 0) else \
        'Update the driver, then: %s. Or install a cuDNN for CUDA %s' % (install, dotted(driver))


def dotted(version: Version) -> str:
    """Return ``(12, 9)`` as ``'12.9'``."""
    return '.'.join(str(number) for number in version)


def listed(capabilities: Sequence[Version]) -> str:
    """Return ``[(8, 6), (6, 1), (6, 1)]`` as ``'6.1, 8.6'``."""
    return ', '.join(map(dotted, sorted(set(capabilities))))


def as_number(capability: Version) -> int:
    """Return compute capability ``(8, 6)`` as the number of its architecture, 86."""
    return 10 * capability[0] + capability[1]
