"""Settings of PoCL."""
import os

from ..jobs import mpi_environment


def default_pocl_settings():
    """PoCL shows one device unless POCL_DEVICES says otherwise; it reads its settings at the first OpenCL call.

    Processes of a job on one host get a cache of compiled kernels each: they build the same kernels at the same
    moment. Without this, now and then one of them ends with "clBuildProgram: Unknown error" (PoCL 3.1).
    """
    os.environ.setdefault('POCL_DEVICES', 'pthread pthread')
    if mpi_environment.local_rank() > 0:
        cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
        folder = os.path.join(cache, 'pocl', 'kcache-rank%d' % mpi_environment.local_rank())
        os.environ.setdefault('POCL_CACHE_DIR', folder)
