"""The processes that a function runs over."""
import theano

from ..jobs import mpi_environment
from .mpi import mpi_ranks
from .process_group import Ranks


def choose_ranks(name):
    """The processes that a function runs over, for the name of an executor."""
    name = name or theano.config.mgpu.executor
    if mpi_environment.started_by_rank():
        return Ranks()
    if name == 'mpi' or (name == 'auto' and mpi_environment.size() > 1):
        return mpi_ranks()
    return Ranks()
