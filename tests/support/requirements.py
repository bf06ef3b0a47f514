"""What tests need that not every machine has: why it is missing here, by the marker of the tests that need it.

conftest.py skips a test with one of these markers, with that reason.
"""
import functools
import importlib.util
import shutil

import theano_mgpu  # noqa: F401
from theano_mgpu.devices import discovery

import theano

from .devices import gpu_devices


@functools.lru_cache(maxsize=None)
def no_device():
    return None if gpu_devices() else 'no GPU or OpenCL device: %s' % discovery.discover('opencl')[1]


def no_mpi():
    if not shutil.which('mpirun') or importlib.util.find_spec('mpi4py') is None:
        return 'no mpirun, or no mpi4py: apt-get install openmpi-bin python3-mpi4py'


def no_compiler():
    return None if theano.config.cxx else 'Theano has no convolution without a C++ compiler'


# Functions that return a reason, or None where nothing is missing.
MISSING = {'opencl': no_device, 'mpi': no_mpi, 'needs_compiler': no_compiler}


def takes_a_gpu(item):
    """Whether a test computes on the devices of `gpu_devices`: by the fixture gpu2, or as its parameter says."""
    values = item.callspec.params.values() if hasattr(item, 'callspec') else ()
    return 'gpu2' in getattr(item, 'fixturenames', ()) or any(isinstance(v, str) and v == 'gpu' for v in values)
