"""Requirements of tests that not every machine meets.

For each marker, a function returns the reason why this machine does not meet the requirement. conftest.py skips tests
with the marker, for that reason.
"""
import functools
import importlib.util
import os
import re
import shutil
import subprocess

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


@functools.lru_cache(maxsize=None)
def is_open_mpi_5():
    """Return whether mpirun is of Open MPI 5, or later."""
    output = subprocess.run(['mpirun', '--version'], stdout=subprocess.PIPE, text=True).stdout
    return bool(re.search(r'\(Open MPI\) ([5-9]|\d\d)', output))


def no_compiler():
    return None if theano.config.cxx else 'Theano has no convolution without a C++ compiler'


def no_slurm():
    return None if os.environ.get('MGPU_SLURM') else 'no Slurm of two nodes: make test-slurm starts one'


# Functions that return a reason, or None if nothing is missing.
MISSING = {'opencl': no_device, 'mpi': no_mpi, 'needs_compiler': no_compiler, 'slurm': no_slurm}


def takes_a_gpu(item):
    """Return whether a test computes on `gpu_devices`: it has the fixture gpu2, or a parameter 'gpu'."""
    values = item.callspec.params.values() if hasattr(item, 'callspec') else ()
    return 'gpu2' in getattr(item, 'fixturenames', ()) or any(isinstance(v, str) and v == 'gpu' for v in values)


def is_slow_on_opencl(item):
    """Return whether a test would compute on OpenCL, and `make test` computes it on the CUDA stand-in: see `cuda`."""
    core = item.get_closest_marker('cuda')
    on_cpu = hasattr(item, 'callspec') and item.callspec.params.get('kind') == 'cpu'
    return bool(core and core.kwargs.get('opencl') == 'slow' and item.get_closest_marker('opencl') and not on_cpu
                and not any(device.startswith('cuda') for device in gpu_devices()))
