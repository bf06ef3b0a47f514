"""A lock on a checkpoint file or a ledger: two jobs that wrote the same file would continue each other's run."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import weakref

from ...errors import MgpuError, warn
from ...utils.files import check_folder, target_of

CONTENT = re.compile(r'(process \d+ on host .*)?')  # it is empty until it is locked
LONGEST = 1000  # bytes of it
NO_LOCK = '%s is no lock of theano_mgpu: move it, or name another file for %s'
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
        while True:
            file = _opened(name, use)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    _explain(path, use, file, error)
                return
            if _is_at(file, name):
                break
            file.close()  # its former owner has just removed it
        file.truncate(0)
        file.write('process %d on host %s' % (os.getpid(), socket.gethostname()))
        file.flush()
        self.release = weakref.finalize(self, _release, file, name, os.getpid())


def _explain(path, use, file, error):
    """Raise an MgpuError if another process has locked a file; warn if the file cannot be locked."""
    if error.errno not in (errno.EACCES, errno.EAGAIN):
        warn('%s cannot be locked (%s): make sure that no other job writes it' % (path, error))
        return
    file.seek(0)
    raise MgpuError('%s is in use by another job, %s: end that job, or name another file for %s'
                    % (path, file.read() or 'which has just begun', use)) from error


def _opened(name, use):
    """Open a lock, which is made if there is none; raise an MgpuError for a file that the package did not make."""
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if os.path.islink(name) or os.path.isdir(name):
            raise MgpuError(NO_LOCK % (name, use)) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink < 2 and \
            CONTENT.fullmatch(os.pread(descriptor, LONGEST, 0).decode(errors='replace')):
        return os.fdopen(descriptor, 'a+')
    os.close(descriptor)
    raise MgpuError(NO_LOCK % (name, use))


def _is_at(file, name):
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(name))
    except OSError:  # it was removed, or its folder, or that may not be searched any more
        return False


def _release(file, name, process):
    """Remove a lock, if it is there: its folder may have been removed, and made again."""
    if os.getpid() == process and _is_at(file, name):  # a forked process has the object, but not the lock
        with contextlib.suppress(OSError):  # in a folder that is read-only by now it stays: the next job takes it
            os.remove(name)
    file.close()
