"""A spare process of a job: it runs the script up to the first checkpoint, and waits there until it is needed.

It has imported, built and compiled all by then.
"""
from __future__ import annotations

import functools
import os
import time

from . import mpi_environment, rank_process

LOOK = 0.02  # seconds from one look for the file to the next


@functools.lru_cache(maxsize=None)
def wait_until_needed() -> None:
    """Wait in a spare process until the launcher needs it; return at once in any other process, and later on."""
    path = os.environ.pop(mpi_environment.SPARE, None)
    if path is None or mpi_environment.started_by_rank():
        return
    rank_process.report(mpi_environment.READY)
    while not os.path.exists(path):  # a launcher that is killed ends this process, see `rank_process.install`
        time.sleep(LOOK)
