"""A spare process of a job: it runs the script up to the first checkpoint, and waits there until it is needed.

It has imported, built and compiled all by then. `theano-mgpu launch` locks a file as long as the process is a spare.
"""
from __future__ import annotations

import fcntl
import functools
import os

from . import mpi_environment, rank_process

NEEDED = b'needed'  # the content of the file, once the process takes the place of one that has ended


@functools.lru_cache(maxsize=None)
def wait_until_needed() -> None:
    """Wait in a spare process until the launcher needs it; return at once in any other process, and later on."""
    path = os.environ.pop(mpi_environment.SPARE, None)
    if path is None or mpi_environment.started_by_rank():
        return
    rank_process.report(mpi_environment.READY)
    with open(path, 'rb') as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if file.read() != NEEDED:  # the launcher was killed
            os._exit(1)
