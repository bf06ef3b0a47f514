"""Files that are written completely or not at all.

The rules for each file that the package writes: a symbolic link is written through, so that the link stays and its
target is replaced, in the target's folder. A folder or a device in the place of a file is an error. Nothing is removed
or replaced beside the file itself, unless its name or its content shows that the package wrote it.
"""
from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import socket
import stat
from typing import Iterator, TextIO

from ..errors import MgpuError

SUFFIX = '.unfinished'
_STANDARD = {'/dev/stdout': 1, '/dev/stderr': 2}


def target_of(path: str) -> str:
    """Return the file that a path stands for: `path` itself or, of a symbolic link, the target, which may be missing.

    Raises an OSError if a file cannot be there: a folder, a device or a pipe is, or links lead in a circle.
    """
    target = os.path.realpath(path) if os.path.islink(path) else os.fspath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, 'it is a folder, not a file', target)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, 'it is a device or a pipe, not a file', target)
    return target


@contextlib.contextmanager
def whole_file(path: str, previous: str | None = None, flush: bool = True) -> Iterator[str]:
    """Write a file under a temporary name, which becomes `path` at the end of the ``with`` block unless that raises.

    An interrupted write leaves the old file intact: at every moment there is a complete file, the old one or the new
    one. If `path` is a symbolic link, its target is replaced. Temporary files of dead processes of this host are
    removed. `previous` is a name under which the old file is kept, in place of another one. Without `flush`, the file
    may be empty after a power failure. The message of an OSError names `path`.
    """
    with _explained(path):
        target = target_of(path)
        _remove_leftovers(target)
        unfinished = _made(_unfinished(target))
        try:
            yield unfinished
            if flush:
                flush_file(unfinished)
            if previous is not None:
                _keep(target, previous)
            os.replace(unfinished, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(unfinished)
    if flush:
        flush_folder(os.path.dirname(target))


@contextlib.contextmanager
def whole_text(path: str) -> Iterator[TextIO]:
    """Open a text file for writing, which is written as by `whole_file`.

    A device or a pipe, such as ``/dev/stdout``, is written to as it is.
    """
    if _is_stream(path):
        number = _STANDARD.get(os.path.abspath(path))
        # A file that stdout is redirected to goes on where stdout is.
        with _explained(path), open(path if number is None else os.dup(number), 'w') as file:
            yield file
    else:
        with whole_file(path, flush=False) as unfinished, open(unfinished, 'w') as file:
            yield file


def check_writable(path: str) -> None:
    """Raise an OSError if a file cannot be written; the file stays as it is."""
    if not _is_stream(path):
        with _explained(path):
            os.remove(_made(_unfinished(target_of(path))))


def check_own(path: str) -> None:
    """Raise a PermissionError if a file or folder is another user's, or a link, or if other users can write there."""
    status = os.lstat(path)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, 'other users can write there, or it is theirs', path)


def check_folder(path: str) -> None:
    """Raise an MgpuError if a file's folder is not there, or may not be written to."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        raise MgpuError('%s cannot be written: there is no folder %s, or no permission to write there' % (path, folder))


def _is_stream(path):
    """Return whether a path is a device or a pipe, or stands for stdout or stderr."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
    return os.path.abspath(path) in _STANDARD or not (regular or os.path.isdir(path))


@contextlib.contextmanager
def _explained(path):
    """Name the file in an OSError of the ``with`` block."""
    try:
        yield
    except OSError as error:
        text = '%s could not be written, and is as it was before: %s' % (path, error.strerror or error)
        raise (OSError(error.errno, text) if error.errno else OSError(text)) from error


def _unfinished(path, pid=None):
    return '%s.%s.%s%s' % (path, socket.gethostname(), pid or os.getpid(), SUFFIX)


def _made(path):
    """Make a file, or empty it; an OSError if a link, a folder or a pipe has its name. Return the path."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))
    return path


def _keep(path, previous):
    """Link the file `path` as `previous`, too."""
    if not os.path.exists(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(previous)  # its newer version was removed by the user
        return
    with whole_file(previous) as second:
        os.remove(second)  # a link needs a name that is free
        try:
            os.link(path, second)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, second)


def _remove_leftovers(path):
    """Remove temporary files of dead processes of this host."""
    prefix = _unfinished(path, 'x')[:-len('x' + SUFFIX)]
    for leftover in glob.glob(glob.escape(prefix) + '*' + SUFFIX):
        pid = leftover[len(prefix):-len(SUFFIX)]
        if pid.isdecimal():
            with contextlib.suppress(OSError, OverflowError):  # a process of another user; a number that no process has
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    if stat.S_ISREG(os.lstat(leftover).st_mode):
                        os.remove(leftover)


def flush_file(path: str) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: str) -> None:
    """Wait until the entries of a folder are on the disk, where the file system can tell."""
    with contextlib.suppress(OSError):  # some file systems cannot, and may show the old file after a power failure
        flush_file(folder or os.curdir)
