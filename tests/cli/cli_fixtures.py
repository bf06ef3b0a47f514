"""Fixtures of the tests of commands."""
import theano_mgpu as mgpu
from theano_mgpu.cli.doctor import device_checks
from theano_mgpu.compat import cuda_libraries
from theano_mgpu.devices import discovery

import pytest

__all__ = ['cpu_only', 'opencl', 'own_contexts']


@pytest.fixture(autouse=True)
def own_contexts():
    """Restore the active contexts, which the commands change, for other tests."""
    yield
    mgpu.init('host0->cpu')


@pytest.fixture
def cpu_only(monkeypatch):
    """Return THEANO_FLAGS with `cpu` contexts, on a machine without an NVIDIA GPU."""
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=cli_a->cpu;cli_b->cpu')
    monkeypatch.setattr(device_checks, 'nvidia_gpu_present', lambda: False)
    monkeypatch.setattr(cuda_libraries, 'survey', lambda: cuda_libraries.Survey([], (), {}))
    monkeypatch.setattr(discovery, 'discover', lambda kind: (['cpu'], '') if kind == 'cpu' else ([], 'none here'))


@pytest.fixture
def opencl():
    """Return the OpenCL devices of this machine."""
    found, why_none = discovery.discover('opencl')
    if not found:
        pytest.skip('no OpenCL device: ' + why_none)
    return found
