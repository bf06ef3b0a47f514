"""Discovery of devices, and their properties."""
import sys
import types

from theano_mgpu.devices import discovery

import pytest


def test_kinds():
    kinds = {'cpu': 'cpu', 'cuda': 'cuda', 'cuda12': 'cuda', 'opencl1:0': 'opencl', 'opencl0': None, 'cpu0': None,
             'gpu': None, 'cuda0 ': None, '': None}
    assert {device: discovery.kind_of(device) for device in kinds} == kinds


def test_what_is_found_can_be_opened(contexts):
    found, why_none = discovery.discover('opencl')
    if not found:
        assert why_none
        pytest.skip('no OpenCL device: %s' % why_none)
    assert found[0] == 'opencl0:0' and why_none == ''
    import pygpu
    assert pygpu.init(found[-1]).devname


def test_why_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pygpu', None)
    assert discovery.discover('cuda')[0] == [] and 'pygpu cannot be imported' in discovery.discover('cuda')[1]
    assert discovery.discover_best() == ['cpu']


def test_the_best_kind_wins(monkeypatch):
    monkeypatch.setenv('POCL_DEVICES', '')  # else PoCL is not asked what they are
    found = {'cuda': ['cuda0', 'cuda1'], 'opencl': ['opencl0:0'], 'cpu': ['cpu']}
    monkeypatch.setattr(discovery, 'discover', lambda kind: (found[kind], ''))
    monkeypatch.setattr(discovery, 'type_of', lambda device: 'GPU')
    assert discovery.discover_best() == ['cuda0', 'cuda1']
    found['cuda'] = []
    assert discovery.discover_best() == ['opencl0:0']


def test_status_of_the_host():
    status = discovery.status('cpu', None)
    assert status.name and 0 < status.free_bytes <= status.total_bytes and status.utilisation is None


def test_status_of_a_device(gpu2):
    from theano_mgpu.devices.contexts import gpu_context
    status = discovery.status(gpu2[0].device, gpu_context(gpu2[0]))
    assert status.name and 0 < status.free_bytes <= status.total_bytes


def test_utilisation_is_that_of_the_devices_pci_address(monkeypatch):
    """No NVIDIA device is here: a stand-in for nvidia-ml-py records the address that it is asked for."""
    asked = []

    class NotSupported(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NotSupported, nvmlInit=lambda: None, nvmlShutdown=lambda: asked.append('shutdown'),
        nvmlDeviceGetHandleByPciBusId=lambda address: asked.append(address) or 'handle',
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(free=3, total=4),
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=37))
    monkeypatch.setitem(sys.modules, 'pynvml', nvml)
    gpu = types.SimpleNamespace(devname=b'GPU ', free_gmem=1, total_gmem=2, unique_id='0000:3B:00.0')
    assert discovery.status('cuda0', gpu) == ('GPU', 1, 2, 37)
    assert asked == ['0000:3B:00.0', 'shutdown']

    def unsupported(handle):
        raise NotSupported
    nvml.nvmlDeviceGetUtilizationRates = unsupported
    assert discovery.status('cuda0', gpu).utilisation is None


def test_without_nvml_the_utilisation_is_unknown():
    """`theano-mgpu devices` ended with "NVML Shared Library Not Found"."""
    pytest.importorskip('pynvml', reason='nvidia-ml-py is not installed')
    gpu = types.SimpleNamespace(devname=b'GPU', free_gmem=1, total_gmem=2, unique_id='0000:FF:00.0')
    assert discovery.status('cuda0', gpu).utilisation is None
