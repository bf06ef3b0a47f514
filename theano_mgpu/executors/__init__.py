"""Executors: run one task a replica. One contract (`base.Executor`), several strategies."""
import functools

from ..errors import MgpuError
from .base import Executor, TaskError
from .serial import SerialExecutor
from .threads import ThreadsExecutor

__all__ = ['Executor', 'TaskError', 'SerialExecutor', 'ThreadsExecutor', 'make_executor']


@functools.lru_cache(maxsize=None)
def make_executor(name, n_replicas):
    """The executor of a name, shared by all functions over as many replicas.

    Parameters
    ----------
    name : {'serial', 'threads'}
    n_replicas : int

    Returns
    -------
    Executor

    Raises
    ------
    MgpuError
        For another name.
    """
    if name == 'serial' or (name == 'threads' and n_replicas == 1):
        return SerialExecutor()
    if name == 'threads':
        return ThreadsExecutor(n_replicas)
    raise MgpuError('executor %r is none of auto, serial, threads, mpi; set executor= or the flag '
                    'mgpu.executor' % (name,))
