"""The patches of this room: what Theano does differently in one of several processes."""
from __future__ import annotations

from typing import ContextManager

from ..compat import keras_saving
from ..compat.import_hooks import replaced
from ..compat.patch import AFTER_THEANO, BEFORE_THEANO, Patch, after, during
from ..errors import MgpuError
from ..utils import mpi_environment
from . import mpi_library, trackers


def hidden_mpi() -> ContextManager[None]:
    """Hide mpi4py from Theano 1.0.5 while it is imported, except in a process that mpirun started.

    Theano imports mpi4py wherever it is installed, for two Ops that send and receive.
    """
    return replaced({'mpi4py.MPI': None}, not mpi_environment.is_rank() or not _has_working_mpi())


def _has_working_mpi():
    try:
        mpi_library.import_mpi()
    except MgpuError:  # it is raised again when the ranks are needed
        return False
    return True


def leave_compiling_to_the_first_rank() -> None:
    """Have one rank of each host compile several modules at a time; the others load them."""
    from theano import config
    if mpi_environment.local_rank():
        config.mgpu.compile_jobs = 1


if mpi_environment.size() > 1:
    keras_saving.share_files()

PATCHES = [
    Patch('Theano', '1.0.5', 'import theano starts MPI, or ends with: cannot load MPI library',
          during('theano'), hidden_mpi, 'test_an_mpi4py_without_mpi_does_not_end_the_import'),
    Patch('Theano', '1.0.5', 'each rank of a host compiles the same modules, on all cores',
          AFTER_THEANO, leave_compiling_to_the_first_rank, 'test_one_rank_of_a_host_compiles_ahead'),
    Patch('Weights & Biases, Neptune', 'all', 'each rank of a job records a run',
          BEFORE_THEANO, trackers.silence_trackers, 'test_ranks_record_one_run'),
    Patch('MLflow', 'all', 'each rank of a job records a run',
          after('mlflow'), trackers.record_elsewhere, 'test_ranks_record_one_run'),
]
