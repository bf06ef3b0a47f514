"""The devices of this machine, as pygpu sees them, and their status."""
import ctypes
import re
from collections import namedtuple

from ..errors import ContextError, warn
from ..patches import opencl_programs
from . import cuda_libraries

DEVICE_PATTERN = re.compile('cpu|cuda([0-9]{0,4})|opencl([0-9]{1,4}):([0-9]{1,4})')
KINDS = ('cuda', 'opencl', 'cpu')
# From cl.h.
ALL_TYPES, DEVICE_TYPE = 0xFFFFFFFF, 0x1000
OPENCL_TYPES = {2: 'CPU', 4: 'GPU', 8: 'accelerator'}

DeviceStatus = namedtuple('DeviceStatus', 'name free_bytes total_bytes utilisation')


def kind_of(device):
    """Kind of a device: ``'cuda'``, ``'opencl'`` or ``'cpu'``; None if it is spelled like no device.

    Examples
    --------
    >>> kind_of('cuda0'), kind_of('opencl0:1'), kind_of('cpu'), kind_of('gpu0')
    ('cuda', 'opencl', 'cpu', None)
    """
    if not DEVICE_PATTERN.fullmatch(device):
        return None
    return next(kind for kind in KINDS if device.startswith(kind))


def reason(error):
    """Text of an exception; pygpu's carry bytes.

    Examples
    --------
    >>> reason(ValueError(b'Device ID out of range'))
    'Device ID out of range'
    """
    text = error.args[0] if error.args else type(error).__name__
    return text.decode('utf8', 'replace') if isinstance(text, bytes) else str(text)


def discover(kind):
    """Find the devices of one kind with pygpu.

    Parameters
    ----------
    kind : {'cuda', 'opencl', 'cpu'}

    Returns
    -------
    devices : list of str
        For example ``['cuda0', 'cuda1']``; may be empty.
    why_none : str
        If `devices` is empty, pygpu's own reason, or what is wrong with CUDA's libraries; else the empty string.
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
        counts = [gpuarray.count_devices(kind, platform)
                  for platform in range(gpuarray.count_platforms(kind))]
    # An OpenCL loader without a driver is a "GpuArrayException" too: no device, and this is why.
    except (gpuarray.GpuArrayException, ContextError) as error:
        return [], reason(error)
    if kind == 'cuda':
        found = ['cuda%d' % i for i in range(sum(counts))]
    else:
        found = ['opencl%d:%d' % (p, d) for p, count in enumerate(counts) for d in range(count)]
    return found, '' if found else 'pygpu finds no %s device' % kind


def type_of(device):
    """Type of a device: ``'GPU'``, ``'CPU'`` or ``'accelerator'``; None if OpenCL reports none of these.

    Parameters
    ----------
    device : str
        One that `discover` found.

    Examples
    --------
    >>> type_of('cuda0'), type_of('cpu')
    ('GPU', 'CPU')
    """
    if kind_of(device) != 'opencl':
        return 'CPU' if device == 'cpu' else 'GPU'
    platform, number = (int(part) for part in DEVICE_PATTERN.fullmatch(device).groups()[1:])
    try:
        library = ctypes.CDLL(opencl_programs.LOADER)
    except OSError:  # pygpu found another loader
        return None
    platforms = (ctypes.c_void_p * (platform + 1))()
    library.clGetPlatformIDs(platform + 1, platforms, None)
    devices, bits = (ctypes.c_void_p * (number + 1))(), ctypes.c_uint64()
    library.clGetDeviceIDs(ctypes.c_void_p(platforms[platform]), ctypes.c_uint64(ALL_TYPES), number + 1, devices, None)
    library.clGetDeviceInfo(ctypes.c_void_p(devices[number]), DEVICE_TYPE, ctypes.c_size_t(ctypes.sizeof(bits)),
                            ctypes.byref(bits), None)
    return next((name for bit, name in OPENCL_TYPES.items() if bits.value & bit), None)


def opencl_cpus():
    """OpenCL devices that are CPUs: they are several times slower than ``cpu``, and used only where they are mapped."""
    return [device for device in discover('opencl')[0] if type_of(device) == 'CPU']


def discover_best():
    """Devices to use by default: every CUDA device, else every OpenCL device that is not a CPU, else ``cpu``.

    Warns about CUDA devices that cannot be used.
    """
    for kind in KINDS:
        found, why_none = discover(kind)
        if kind == 'opencl':
            found = [device for device in found if type_of(device) != 'CPU']
        if found:
            return found
        if kind == 'cuda' and cuda_libraries.survey().capabilities:
            warn("this machine's CUDA devices are not used: " + why_none)


def status(device, gpu_context):
    """Name, memory and utilisation of a device.

    Parameters
    ----------
    device : str
    gpu_context : pygpu.gpuarray.GpuContext or None
        The open device; None for ``cpu``.

    Returns
    -------
    DeviceStatus
        Bytes; utilisation in percent for NVIDIA devices where nvidia-ml-py is installed, else None.
    """
    if gpu_context is None:
        return DeviceStatus(_cpu_name(), *_cpu_memory(), None)
    name = gpu_context.devname
    name = name.decode('utf8', 'replace') if isinstance(name, bytes) else name
    utilisation = _nvidia_utilisation(gpu_context) if device.startswith('cuda') else None
    return DeviceStatus(name.strip(), gpu_context.free_gmem, gpu_context.total_gmem, utilisation)


def _nvidia_utilisation(gpu_context):
    """Utilisation in percent, found by PCI address: CUDA and NVML number devices differently.

    None where NVML is missing, as in some containers, or reports none, as for a slice of a device (MIG).
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu_context.unique_id)
        return pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _proc_fields(path):
    """First value of each ``key: value`` line of a file under /proc; empty where there is none."""
    fields = {}
    try:
        with open(path) as f:
            for line in f:
                key, _, value = line.partition(':')
                fields.setdefault(key.strip(), value.strip())
    except FileNotFoundError:  # not Linux: the name and memory of the host stay unknown
        return {}
    return fields


def _cpu_name():
    return _proc_fields('/proc/cpuinfo').get('model name', 'host')


def _cpu_memory():
    fields = _proc_fields('/proc/meminfo')
    return tuple(int(fields[key].split()[0]) * 1024 if key in fields else None
                 for key in ('MemAvailable', 'MemTotal'))
