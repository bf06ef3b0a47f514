"""The folder with the rows of an output that is not complete: whose it is, and which files are in it.

The folder is recognised by a marker that is written before anything else. Files are removed one by one, by their names,
and only in a folder of the package's own in which all files have names of its own.
"""
import contextlib
import fcntl
import json
import os
import re
import stat

from ..errors import MgpuError
from .output import note

MARKER = 'theano-mgpu-predict.txt'
TEXT = 'theano-mgpu predict keeps the rows of a file here until that is complete. To begin anew, remove this folder.\n'
JOB = 'job.json'
NAMES = re.compile(r'%s|job\.json(\.new)?|\d+\.npy(\.new)?|whole\.(npz|h5|hdf5)' % re.escape(MARKER), re.ASCII)
JOB_KEYS = {'format', 'outputs'}  # of each job, so that the folders of earlier versions, without a marker, are known


class UnfinishedFolder:
    """A folder of the package's own, locked for this process until `close`; made if it does not exist.

    Parameters
    ----------
    path : str
    output : str
        The output file, for messages.
    job : dict
        The job that the folder is for, as JSON can hold it.

    Raises
    ------
    MgpuError
        If the folder cannot be made, is in use, or has anything in it that the package did not write.
    """

    def __init__(self, path, output, job):
        self.path, self._output = path, output
        self._job = json.dumps(job, indent=1)
        try:
            self._open()
            try:
                self._claim()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise MgpuError('the output %s cannot be written: %s: %s'
                            % (output, path, error.strerror or error)) from error

    def at(self, name):
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def job(self):
        """Return the job that the rows are of, a dict; None if that cannot be told."""
        return _dict(self._content(JOB))

    def begin(self):
        """Remove all rows, and note the job that new ones are of."""
        for name in self._names():
            if name != MARKER:
                os.remove(self.at(name))
        self._write(JOB + '.new', self._job)
        os.replace(self.at(JOB + '.new'), self.at(JOB))

    def remove(self):
        """Remove the folder, with what the package has written in it."""
        names = self._names()
        for name in sorted(names, key=MARKER.__eq__):  # the marker last
            if self._is_own(name):
                os.remove(self.at(name))
        try:
            os.rmdir(self.path)
        except OSError as error:
            note('the folder %s stays: %s' % (self.path, error.strerror))

    def close(self):
        """Unlock the folder."""
        os.close(self._lock)

    def _open(self):
        """Make the folder if there is none, and lock it."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                self._refuse('is no folder, but a link or a file')
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._lock), os.lstat(self.path)):
                    return
            except BlockingIOError as error:
                os.close(self._lock)
                raise MgpuError('another process is writing %s: wait for it, or end it' % self._output) from error
            except FileNotFoundError:  # another process has just finished, and removed it
                pass
            os.close(self._lock)

    def _claim(self):
        """Check that the folder is the package's own, and write the marker."""
        names = self._names()
        foreign = sorted(name for name in names if not self._is_own(name))
        if foreign:
            self._refuse('has files in it that theano-mgpu did not write (%s)' % ', '.join(foreign[:5]))
        if not TEXT.startswith(self._content(MARKER) or '') or MARKER not in names and not self._is_known(names):
            self._refuse('was not made by theano-mgpu (%s)' % ', '.join(sorted(names)[:5]))
        if self._content(MARKER) != TEXT:
            self._write(MARKER, TEXT)

    def _is_known(self, names):
        """Return whether a folder without a marker is of this package: an empty one, or one with a job of its own."""
        if JOB_KEYS <= (_dict(self._content(JOB)) or {}).keys():
            return True
        # Where the machine has stopped, a file may be cut short.
        return names <= {JOB, JOB + '.new'} and all(self._job.startswith(self._content(name) or 'none')
                                                    for name in names if os.path.getsize(self.at(name)))

    def _is_own(self, name):
        """Return whether a file has a name of the package's own, and no other one, and is no link and no folder."""
        status = os.lstat(self.at(name))
        return bool(NAMES.fullmatch(name)) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def _names(self):
        return set(os.listdir(self.path))

    def _content(self, name):
        """Return the text of a file; None without it, or if it is no text."""
        try:
            with open(self.at(name), encoding='utf-8') as file:
                return file.read()
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def _write(self, name, text):
        with open(self.at(name), 'w') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _refuse(self, what):
        raise MgpuError('%s %s: rows of %s are kept there while they are computed. Move it, or choose another name for '
                        'the output' % (self.path, what, self._output))


def _dict(text):
    """Return a dict from JSON; None if it is none."""
    try:
        found = json.loads(text or '')
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
