"""A search for HDF5 files that are so damaged that libhdf5 ends the process which reads them."""
from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress

from ..utils import mpi_environment

LONGEST = 10  # seconds of the processor; in a damaged file libhdf5 may go in circles


def check_hdf5(path: str) -> None:
    """Raise a ValueError if libhdf5 ends the process that reads the structure of a file.

    A child process reads the file first: a crash cannot be caught otherwise. Other faults of the file raise errors in
    the code that reads it later.
    """
    if mpi_environment.trains_together():
        return  # MPI libraries may not survive a fork
    import h5py  # noqa: F401  before the fork
    child = os.fork()
    if child == 0:
        try:
            _read(path)
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        raise ValueError('libhdf5 cannot read it without an end of the process, by signal %d: the file is damaged'
                         % os.WTERMSIG(status))


def _read(path):
    """Read all of a file but its arrays."""
    import h5py
    faulthandler.disable()  # it would print the traceback of the child
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    with h5py.File(path, 'r') as file:
        _visit(file, set())


def _visit(item, seen):
    """Read the attributes of an item, and all items in it, as far as they can be read."""
    import h5py
    with suppress(Exception):
        for name in item.attrs:
            with suppress(Exception):
                item.attrs[name]
    with suppress(Exception):
        if isinstance(item, h5py.Dataset):
            repr((item.shape, item.dtype, item.chunks))
        else:
            for name in item:
                with suppress(Exception):
                    member = item[name]
                    address = h5py.h5o.get_info(member.id).addr
                    if address not in seen:  # a group may have several names, also within itself
                        seen.add(address)
                        _visit(member, seen)
