"""A lock on a checkpoint file: if two jobs wrote the same file, each would continue from the other's state."""
import errno
import fcntl
import os
import socket
import weakref

from ..errors import MgpuError, warn

_held = weakref.WeakValueDictionary()  # (path, process id) to CheckpointLock: a process may lock a file several times


def lock_checkpoint(path):
    """Lock a checkpoint file for this process, until the last reference to the CheckpointLock is gone.

    Parameters
    ----------
    path : str

    Returns
    -------
    CheckpointLock

    Raises
    ------
    MgpuError
        If another process has locked the file; the message names it.
    """
    path = os.path.realpath(path)
    lock = _held.get((path, os.getpid()))
    if lock is None:
        lock = _held[path, os.getpid()] = CheckpointLock(path)
    return lock


class CheckpointLock:
    """A locked file beside a checkpoint; it is removed in the end.

    It is locked by `fcntl.lockf`, not `flock`: a child process that outlives this one does not inherit the lock.

    Parameters
    ----------
    path : str
        The checkpoint file.
    """

    def __init__(self, path):
        self._file = None
        name = path + '.lock'
        while self._file is None:
            file = open(name, 'a+')
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    self._explain(path, file, error)
                return
            if _is_at(file, name):
                self._file = file
            else:  # its former owner has just removed it
                file.close()
        file.truncate(0)
        file.write('process %d on host %s' % (os.getpid(), socket.gethostname()))
        file.flush()
        self.release = weakref.finalize(self, _release, file, name, os.getpid())

    def _explain(self, path, file, error):
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warn('%s cannot be locked (%s): make sure that no other job writes its checkpoints there' % (path, error))
            return
        file.seek(0)
        raise MgpuError('%s is in use for the checkpoints of another job, %s: end that job, or name another file'
                        % (path, file.read() or 'which has just begun')) from error


def _is_at(file, name):
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def _release(file, name, process):
    if os.getpid() == process:  # a forked process has the object, but not the lock
        os.remove(name)
    file.close()
