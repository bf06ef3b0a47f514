"""Files and folders that one process owns: it has locked them, and their content shows that the package made them.

A job's checkpoint and ledger, its folders on this host, and the rows of an unfinished prediction are owned like this.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import Callable

LONGEST = 1000  # bytes of a file that tell whether the package made it


def locked(path: str, opened: Callable[[str], int], lock: Callable[[int, int], object] = fcntl.flock) -> int:
    """Open and lock a file or folder that other processes may remove.

    Parameters
    ----------
    path : str
    opened : callable
        Makes what is not there, and returns a descriptor of it; raises an error for what the package did not make.
    lock : callable
        `fcntl.flock`, by which child processes share the lock, or the like; raises an error if another process has it.

    Returns
    -------
    int
        A descriptor of what is at `path` now; to close it is to unlock it.

    Raises
    ------
    BlockingIOError
        If another process has locked it.
    """
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = opened(path)
            stack.callback(os.close, descriptor)
            lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, path):  # else its former owner has just removed it
                stack.pop_all()
                return descriptor


def open_own(path: str, is_own: Callable[[bytes], object], flags: int = os.O_CREAT) -> int:
    """Open a file of the package's own, and return its descriptor.

    Parameters
    ----------
    path : str
    is_own : callable
        Tells from the content of a file whether the package made it; a file that was just made is empty.
    flags : int
        0 for no new file.

    Raises
    ------
    FileExistsError
        If something else is there: another file, a file with a second name, a link, a folder, a pipe.
    """
    if not os.path.islink(path) and not os.path.isdir(path):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink < 2 and is_own(content(descriptor)):
            return descriptor
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, 'theano_mgpu did not make it', path)


def content(descriptor: int) -> bytes:
    """Return the first `LONGEST` bytes of a file."""
    return os.pread(descriptor, LONGEST, 0)


def is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file or folder still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:  # it was removed, or its folder, or that may not be searched any more
        return False
