"""The folders of a job on this host: for its reports, mpirun's files and shared memory. A launch that was killed leaves
them.
"""
from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from typing import Iterator

from ..utils import mpi_environment, owned

# Without these, all jobs of a user share one folder for temporary files. Open MPI removes it with the last job in it,
# even if the next one is about to use it, which then ends with an error (open-mpi/ompi#8510).
TEMPORARY = ['OMPI_MCA_orte_%stmpdir_base' % where for where in ('', 'local_', 'remote_')]
TEMPORARY += ['PRTE_MCA_prte_tmpdir_base']  # of Open MPI 5
# Folders of the memory that the ranks of a host share; a killed job leaves 4 MB a rank there.
SHARED = ['OMPI_MCA_%s_backing_directory' % component for component in ('btl_vader', 'btl_sm', 'osc_sm', 'osc_rdma')]
MEMORY = '/dev/shm'

PREFIX = 'mgpu.'
LOCK = 'theano_mgpu.lock'
MARK = b'theano-mgpu launch made this folder, and locks this file; its process is '


@contextlib.contextmanager
def job_folders(environment: dict[str, str], on_this_host: bool = True) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Make folders for a job, and remove them at the end: for mpirun's files only if the environment names none.

    The folders of killed jobs are removed, too: folders of this user that no live process has a lock on. Yield the
    environment with the names of the folders, and descriptors to pass on to mpirun, so that the folders count as used
    as long as it runs. For ranks on other hosts, the folders for mpirun would have to be there, too: there are none.
    """
    with contextlib.ExitStack() as stack:
        folder, lock = stack.enter_context(locked_folder(tempfile.gettempdir()))
        environment, locks = {**environment, mpi_environment.REPORTS: folder}, [lock]
        if on_this_host and not any(name in environment for name in TEMPORARY):
            environment.update(dict.fromkeys([TEMPORARY[0], TEMPORARY[-1]], folder))
        if on_this_host and not any(name in environment for name in SHARED) and os.access(MEMORY, os.W_OK):
            folder, lock = stack.enter_context(locked_folder(MEMORY))
            locks.append(lock)
            environment.update(dict.fromkeys(SHARED, folder))
        yield environment, locks


@contextlib.contextmanager
def locked_folder(parent: str) -> Iterator[tuple[str, int]]:
    """Make a folder and lock it; yield its path and the lock's descriptor. Those that nobody locks are removed."""
    remove_abandoned(parent)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    try:
        with open(os.path.join(folder, LOCK), 'wb', buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            lock.write(MARK + b'%d\n' % os.getpid())  # after the lock: an unlocked folder with the mark is abandoned
            yield folder, lock.fileno()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: str) -> None:
    """Remove folders of killed jobs of this user, in which `LOCK` has the `MARK`, and nobody locks it."""
    for folder in glob.glob(os.path.join(glob.escape(parent), PREFIX + '*')):  # none without a /dev/shm
        with contextlib.suppress(OSError):  # a live process has the lock, or it is no folder of this package
            status = os.lstat(folder)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                os.close(owned.locked(os.path.join(folder, LOCK), lambda content: content.startswith(MARK), flags=0))
                shutil.rmtree(folder, ignore_errors=True)  # another launch may be removing it as well
