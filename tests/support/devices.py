"""Devices that tests run on, and maps of contexts on them."""
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.utils import flag_text

import pytest


def gpu_devices():
    """Return GPU devices to test on: the devices of the flag `contexts`, else two of this machine's."""
    flagged = [c.device for c in parse_context_map(flag_text.flag('contexts', '')) if c.kind != 'cpu'] \
        if flag_text.flag('contexts') else []
    found = flagged or discovery.discover('cuda')[0] or discovery.discover('opencl')[0]
    return (found * 2)[:max(2, len(found))]


def context_map(kind, n):
    """Return a map of n contexts on CPU or GPU devices; GPU devices are taken in turn.

    Skips the test if there is no GPU device, for tests without the marker `opencl`.
    """
    if kind == 'cpu':
        return ';'.join('host%d->cpu' % i for i in range(n))
    found = gpu_devices()
    if not found:
        pytest.skip('no GPU or OpenCL device: %s' % discovery.discover('opencl')[1])
    return ';'.join('dev%d->%s' % (i, found[i % len(found)]) for i in range(n))
