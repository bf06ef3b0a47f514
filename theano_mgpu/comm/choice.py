"""The processes that a function runs over."""
from __future__ import annotations

import theano

from ..utils import mpi_environment
from .alone import Alone
from .communicator import Communicator
from .mpi import mpi_communicator


def choose_ranks(name: str | None) -> Communicator:
    """Return the processes that a function runs over, for the name of an executor."""
    name = name or theano.config.mgpu.executor
    if mpi_environment.started_by_rank():
        return Alone()
    if name == 'mpi' or (name == 'auto' and mpi_environment.size() > 1):
        return mpi_communicator()
    return Alone()
