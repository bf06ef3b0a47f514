"""A lock on a checkpoint file: two jobs that write one would each take the other's state for its own."""
import errno
import fcntl
import os
import socket
import weakref

from ..errors import MgpuError, warn

_held = weakref.WeakValueDictionary()  # (path, process) to CheckpointLock: a process may use a file several times


def lock_checkpoint(path):
    """Keep a checkpoint file to this process, until the last reference to what is returned is gone.

    Parameters
    ----------
    path : str

    Returns
    -------
    CheckpointLock

    Raises
    ------
    MgpuError
        If another process has the file; the message names it.
    """
    path = os.path.realpath(path)
    lock = _held.get((path, os.getpid()))
    if lock is None:
        lock = _held[path, os.getpid()] = CheckpointLock(path)
    return lock


class CheckpointLock:
    """What `lock_checkpoint` returns: a locked file beside the checkpoint, which is removed in the end.

    The lock is one of `fcntl.lockf`, not `flock`: a child process that outlives this one does not have it.

    Parameters
    ----------
    path : str
        Of the checkpoint.
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
            else:  # whoever had it has just removed it
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
        raise MgpuError('%s is in use for the checkpoints of another job, %s: end that one, or name another file'
                        % (path, file.read() or 'which is just beginning')) from error


def _is_at(file, name):
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def _release(file, name, process):
    if os.getpid() == process:  # a fork has the object, but not the lock
        os.remove(name)
    file.close()
