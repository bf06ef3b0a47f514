"""PoCL's settings: it reads them from the environment at the first OpenCL call of the process."""
from __future__ import annotations

import os

from ..utils import mpi_environment


def default_pocl_settings() -> None:
    """Choose two devices, no warnings, and a cache of kernels for each process, where the environment does not.

    PoCL shows one device by default, and prints "2 warnings generated." for kernels of pygpu.

    The processes of a job on one host build the same kernels at the same time. If they share a cache, one of them
    fails now and then with "clBuildProgram: Unknown error" (PoCL 3.1).
    """
    os.environ.setdefault('POCL_DEVICES', 'pthread pthread')
    os.environ.setdefault('POCL_EXTRA_BUILD_FLAGS', '-w')
    if mpi_environment.local_rank() > 0:
        cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
        folder = os.path.join(cache, 'pocl', 'kcache-rank%d' % mpi_environment.local_rank())
        os.environ.setdefault('POCL_CACHE_DIR', folder)
