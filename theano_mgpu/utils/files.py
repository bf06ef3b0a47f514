"""Files that are written completely or not at all."""
import contextlib
import glob
import os
import shutil
import socket

SUFFIX = '.unfinished'


@contextlib.contextmanager
def whole_file(path, previous=None, flush=True):
    """Write a file under a temporary name, which becomes `path` at the end of the ``with`` block unless that raises.

    An interrupted write leaves the old file intact: at every moment there is a complete file, the old one or the new
    one. Temporary files of dead processes of this host are removed.

    Parameters
    ----------
    path : str
    previous : str, optional
        A name for the old file, which is then kept.
    flush : bool
        Wait until the file is on the disk. Without that, it may be empty after a power failure.

    Raises
    ------
    OSError
        If the file cannot be written; the message names `path`.
    """
    unfinished = _unfinished(path)
    try:
        _remove_leftovers(path)
        yield unfinished
        if flush:
            _flush(unfinished)
        if previous is not None:
            _keep(path, previous)
        os.replace(unfinished, path)
    except OSError as error:
        text = '%s could not be written, and is as it was before: %s' % (path, error.strerror or error)
        raise (OSError(error.errno, text) if error.errno else OSError(text)) from error
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
    if flush:
        _flush_folder(os.path.dirname(path) or os.curdir)


def _unfinished(path, pid=None):
    return '%s.%s.%s%s' % (path, socket.gethostname(), pid or os.getpid(), SUFFIX)


def _keep(path, previous):
    """Link the file `path` as `previous`, too."""
    if not os.path.exists(path):
        if os.path.exists(previous):
            os.remove(previous)  # its newer version was removed by the user
        return
    if os.path.exists(previous) and os.path.samefile(path, previous):
        return
    _remove_leftovers(previous)
    second = _unfinished(previous)
    try:
        try:
            os.link(path, second)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, second)
            _flush(second)
        os.replace(second, previous)
    finally:
        if os.path.exists(second):
            os.remove(second)


def _remove_leftovers(path):
    """Remove temporary files of dead processes of this host."""
    prefix, own = _unfinished(path, 'x')[:-len('x' + SUFFIX)], str(os.getpid())
    for found in glob.glob(glob.escape(prefix) + '*' + SUFFIX):
        pid = found[len(prefix):-len(SUFFIX)]
        if pid.isdecimal() and pid != own and not _is_alive(int(pid)):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                os.remove(found)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


def _flush(path):
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder):
    try:
        _flush(folder)
    except OSError:
        pass  # not supported by some file systems: after a power failure they may show the old file
