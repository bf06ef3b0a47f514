"""Files that one process owns: it has locked them, and their content shows that the package made them.

A job's checkpoint and ledger, its folders on this host, and the rows of an unfinished prediction are owned like this.
"""
from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import socket
import stat
import weakref
from typing import Callable

from ..errors import MgpuError, warn
from .files import check_folder, target_of

LONGEST = 1000  # bytes of a file that tell whether the package made it
CONTENT = re.compile(rb'(process \d+ on host .*)?')  # of a FileLock; it is empty until it is locked
CHECKPOINTS, LEDGER = 'the checkpoints', 'the ledger (mgpu.ledger, --ledger or ledger=)'  # uses of a file

# By path and process id: a process may lock a file several times.
_locks: weakref.WeakValueDictionary[tuple[str, int], FileLock] = weakref.WeakValueDictionary()


def locked(path: str, is_own: Callable[[bytes], object], lock: Callable[[int, int], object] = fcntl.flock,
           flags: int = os.O_CREAT) -> int:
    """Open and lock a file of the package's own that other processes may remove; to close the descriptor unlocks it.

    `is_own` tells from the first `LONGEST` bytes of a file whether the package made it; a file that was just made is
    empty. By the lock `fcntl.flock`, child processes share it. With ``flags=0``, no file is made. Raises the error of
    the lock if another process has it, and a FileExistsError if something else is there: another file, a file with a
    second name, a link, a folder, a pipe.
    """
    while True:
        with contextlib.ExitStack() as stack:
            is_file = not os.path.islink(path) and not os.path.isdir(path)
            if is_file:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
                stack.callback(os.close, file)
                status = os.fstat(file)
                is_file = stat.S_ISREG(status.st_mode) and status.st_nlink < 2
            if not is_file or not is_own(os.pread(file, LONGEST, 0)):
                raise FileExistsError('theano_mgpu did not make %s' % path)
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file, path):  # else its former owner has just removed it
                stack.pop_all()
                return file


def is_at(file: int, place: str | os.stat_result) -> bool:
    """Return whether a descriptor has the file of a name, or of a status; others may have removed it, or closed all.
    """
    try:
        return os.path.samestat(os.fstat(file), os.lstat(place) if isinstance(place, str) else place)
    except OSError:  # it was removed, or its folder, or that may not be searched any more
        return False


def remove(file: int, path: str) -> None:
    """Remove a locked file, if it is there: its folder may have been removed, and made again."""
    if is_at(file, path):
        with contextlib.suppress(OSError):  # in a folder that is read-only by now it stays: the next job takes it
            os.remove(path)


def lock_file(path: str, use: str = CHECKPOINTS) -> FileLock:
    """Lock a file for this process, until the last reference to the FileLock is gone.

    `use` is `CHECKPOINTS` or `LEDGER`, for messages. Raises an MgpuError if another process has locked the file, if a
    file that is no lock has the lock's name, or if nobody may write there; an OSError if `path` cannot be a file.
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
    """

    def __init__(self, path: str, use: str) -> None:
        name = path + '.lock'
        try:
            file = locked(name, CONTENT.fullmatch, functools.partial(_lock, path, use))
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
        owner = os.pread(file, LONGEST, 0).decode(errors='replace') or 'which has just begun'
        raise MgpuError('%s is in use by another job, %s: end that job, or name another file for %s'
                        % (path, owner, use)) from error
    except OSError as error:
        warn('%s cannot be locked (%s): make sure that no other job writes it' % (path, error))


def _release(file, name, process):
    if is_at(file, name):  # else the program has closed it, and another file may have its number
        if os.getpid() == process:  # a forked process has the object, but not the lock
            remove(file, name)
        os.close(file)
