"""The devices of this machine, as pygpu sees them, and their status."""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..compat import cuda_libraries
from ..errors import ContextError, warn
from . import nvml

DEVICE_PATTERN = re.compile('cpu|cuda[0-9]{0,4}|opencl[0-9]{1,4}:[0-9]{1,4}')
KINDS = ('cuda', 'opencl', 'cpu')
LOADER = 'libOpenCL.so.1'
INSTALL_PYGPU = ('on Debian 12 and Ubuntu 22.04, apt-get install python3-pygpu libgpuarray-dev, and a virtual '
                 'environment that sees it: /usr/bin/python3 -m venv --system-site-packages .venv; with conda, for '
                 'Python 3.8 to 3.10, conda install -c conda-forge pygpu=0.7.6; elsewhere, use an image of Debian 12 '
                 'by Docker or podman (docs/guide/install.md)')
# From cl.h.
ALL_TYPES, DEVICE_TYPE = 0xFFFFFFFF, 0x1000
OPENCL_TYPES = {2: 'CPU', 4: 'GPU', 8: 'accelerator'}


class DeviceStatus(NamedTuple):
    """The name, memory and utilisation (percent) of a device; None where they are unknown."""

    name: str
    free_bytes: Optional[int]
    total_bytes: Optional[int]
    utilisation: Optional[int]


def kind_of(device: str) -> str | None:
    """Return the kind of a device: ``'cuda'``, ``'opencl'`` or ``'cpu'``; None if it is spelled like no device.

    >>> kind_of('cuda0'), kind_of('opencl0:1'), kind_of('cpu'), kind_of('gpu0')
    ('cuda', 'opencl', 'cpu', None)
    """
    if not DEVICE_PATTERN.fullmatch(device):
        return None
    return next(kind for kind in KINDS if device.startswith(kind))


def reason(error: BaseException) -> str:
    """Return the text of an exception; pygpu's carry bytes.

    >>> reason(ValueError(b'Device ID out of range'))
    'Device ID out of range'
    """
    return decoded(error.args[0] if error.args else type(error).__name__)


def decoded(text: Any) -> str:
    """Return a text; pygpu and NVML give bytes, in some versions."""
    return text.decode('utf8', 'replace') if isinstance(text, bytes) else str(text)


def discover(kind: str) -> tuple[list[str], str]:
    """Find the devices of one kind with pygpu, such as ``['cuda0', 'cuda1']``.

    Return them and, if there are none, pygpu's own reason, or the problem with CUDA's libraries.
    """
    if kind == 'cpu':
        return ['cpu'], ''
    try:
        from pygpu import gpuarray
    # A build for another NumPy raises ValueError, a missing library OSError.
    except Exception as error:
        return [], 'pygpu cannot be imported: %s' % error
    try:
        if kind == 'cuda':
            cuda_libraries.provide()
        counts = [gpuarray.count_devices(kind, platform) for platform in range(gpuarray.count_platforms(kind))]
    # An OpenCL loader without a driver is a "GpuArrayException" too: no device, and this is why.
    except (gpuarray.GpuArrayException, ContextError) as error:
        return [], reason(error)
    devices = ['cuda%d' % i for i in range(sum(counts))] if kind == 'cuda' else \
        ['opencl%d:%d' % (p, d) for p, count in enumerate(counts) for d in range(count)]
    return devices, '' if devices else 'pygpu finds no %s device' % kind


def type_of(device: str) -> str | None:
    """Return the type of a device: ``'GPU'``, ``'CPU'`` or ``'accelerator'``; None if OpenCL reports none of these."""
    indices = re.fullmatch(r'opencl(\d+):(\d+)', device)
    if indices is None or device in _cpus_of_pocl():
        return 'GPU' if device.startswith('cuda') else 'CPU'
    platform, number = map(int, indices.groups())
    try:
        library = ctypes.CDLL(LOADER)
    except OSError:  # pygpu found another loader
        return None
    platforms = (ctypes.c_void_p * (platform + 1))()
    library.clGetPlatformIDs(platform + 1, platforms, None)
    devices, bits = (ctypes.c_void_p * (number + 1))(), ctypes.c_uint64()
    library.clGetDeviceIDs(ctypes.c_void_p(platforms[platform]), ctypes.c_uint64(ALL_TYPES), number + 1, devices, None)
    library.clGetDeviceInfo(ctypes.c_void_p(devices[number]), DEVICE_TYPE, ctypes.c_size_t(ctypes.sizeof(bits)),
                            ctypes.byref(bits), None)
    return next((name for bit, name in OPENCL_TYPES.items() if bits.value & bit), None)


def opencl_cpus() -> list[str]:
    """Return the OpenCL devices that are CPUs, which are slower than ``cpu``, and used only where they are mapped."""
    return [device for device in discover('opencl')[0] if type_of(device) == 'CPU']


def discover_best() -> list[str]:
    """Return the devices to use by default: all CUDA devices, else all OpenCL devices but CPUs, else ``cpu``.

    Warn about CUDA devices that cannot be used.
    """
    devices, why_none = discover('cuda')
    if not devices and cuda_libraries.survey().capabilities:
        warn("this machine's CUDA devices are not used: " + why_none)
    return devices or [device for device in _cpus_of_pocl() or discover('opencl')[0]
                       if type_of(device) != 'CPU'] or ['cpu']


def _cpus_of_pocl():
    """Return the OpenCL devices, CPUs, where PoCL's driver is the only one: to ask it loads LLVM, 60 MB."""
    drivers = {each.name for root in ('/', sys.prefix) for each in Path(root).glob('etc/OpenCL/vendors/*.icd')}
    named = os.environ.get('POCL_DEVICES', '').split()  # PoCL calls a CPU pthread
    elsewhere = any(name.startswith(('OCL_ICD_', 'OPENCL_')) for name in os.environ)  # drivers that the user names
    is_known = drivers == {'pocl.icd'} and set(named) == {'pthread'} and not elsewhere
    return ['opencl0:%d' % number for number in range(len(named) * is_known)]


def status(device: str, gpu_context: Any) -> DeviceStatus:
    """Return the status of a device, by its open pygpu context, which is None for ``cpu``."""
    if gpu_context is None:
        memory = _proc_fields('/proc/meminfo')
        free, total = (int(memory[key].split()[0]) * 1024 if key in memory else None
                       for key in ('MemAvailable', 'MemTotal'))
        return DeviceStatus(_proc_fields('/proc/cpuinfo').get('model name', 'host'), free, total, None)
    name = decoded(gpu_context.devname)
    seen = nvml.use(decoded(gpu_context.unique_id)) if device.startswith('cuda') else None
    return DeviceStatus(name.strip(), gpu_context.free_gmem, gpu_context.total_gmem, seen and seen.utilisation)


def _proc_fields(path):
    """Return the first value of each ``key: value`` line of a file under /proc; none where there is no such file."""
    fields = {}
    with contextlib.suppress(FileNotFoundError), open(path) as file:  # not Linux: all stays unknown
        for line in file:
            key, _, value = line.partition(':')
            fields.setdefault(key.strip(), value.strip())
    return fields
