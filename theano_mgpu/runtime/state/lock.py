"""A lock on a checkpoint file or a ledger: two jobs that wrote the same file would continue each other's run."""
from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import socket
import weakref

from ...errors import MgpuError, warn
from ...utils import owned
from ...utils.files import check_folder, target_of

CONTENT = re.compile(rb'(process \d+ on host .*)?')  # it is empty until it is locked
CHECKPOINTS, LEDGER = 'the checkpoints', 'the ledger (mgpu.ledger, --ledger or ledger=)'  # uses of a file

# By path and process id: a process may lock a file several times.
_locks: weakref.WeakValueDictionary[tuple[str, int], FileLock] = weakref.WeakValueDictionary()


def lock_file(path: str, use: str = CHECKPOINTS) -> FileLock:
    """Lock a file for this process, until the last reference to the FileLock is gone.

    Parameters
    ----------
    path : str
    use : str
        `CHECKPOINTS` or `LEDGER`, for messages.

    Returns
    -------
    FileLock

    Raises
    ------
    MgpuError
        If another process has locked the file; the message names it. If a file that is no lock has the lock's name. If
        there is no such folder, or nobody may write there.
    OSError
        If `path` cannot be a file, or the lock cannot be made.
    """
    path = os.path.realpath(target_of(path))
    check_folder(path)
    lock = _locks.get((path, os.getpid()))
    if lock is None:
        lock = _locks[path, os.getpid()] = FileLock(path, use)
    return lock


class FileLock:
    """A locked file beside a checkpoint or a ledger; it is removed in the end.

    It is locked by `fcntl.lockf`, not `flock`: a child process that outlives this one does not inherit the lock.

    Parameters
    ----------
    path : str
        The file.
    use : str
    """

    def __init__(self, path: str, use: str) -> None:
        name = path + '.lock'
        try:
            file = owned.locked(name, functools.partial(owned.open_own, is_own=CONTENT.fullmatch),
                                functools.partial(_lock, path, use))
        except FileExistsError as error:
            raise MgpuError('%s is no lock of theano_mgpu: move it, or name another file for %s'
                            % (name, use)) from error
        self.release = weakref.finalize(self, _release, file, name, os.getpid())
        os.truncate(file, 0)
        os.write(file, b'process %d on host %s' % (os.getpid(), socket.gethostname().encode()))


def _lock(path, use, file, operation):
    """Lock a file; raise an MgpuError if another process has locked it; warn if the file cannot be locked."""
    try:
        fcntl.lockf(file, operation)
    except (BlockingIOError, PermissionError) as error:  # either one where another process has it, says POSIX
        owner = owned.content(file).decode(errors='replace') or 'which has just begun'
        raise MgpuError('%s is in use by another job, %s: end that job, or name another file for %s'
                        % (path, owner, use)) from error
    except OSError as error:
        warn('%s cannot be locked (%s): make sure that no other job writes it' % (path, error))


def _release(file, name, process):
    """Remove a lock, if it is there: its folder may have been removed, and made again."""
    if os.getpid() == process and owned.is_at(file, name):  # a forked process has the object, but not the lock
        with contextlib.suppress(OSError):  # in a folder that is read-only by now it stays: the next job takes it
            os.remove(name)
    os.close(file)
