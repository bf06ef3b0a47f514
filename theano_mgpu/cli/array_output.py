"""Output files written row by row: a file is complete or absent, and an interrupted one can be resumed.

The folder of an output that is not complete is recognised by a marker that is written before anything else. Its files
are removed one by one, by their names, and only in a folder of the package's own in which all files have names of its
own.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from ..errors import MgpuError
from ..utils import files
from .array_input import n_bytes, read_header
from .output import note

FORMAT = 1
UNFINISHED = '.unfinished'
MARKER = 'theano-mgpu-predict.txt'
TEXT = 'theano-mgpu predict keeps the rows of a file here until that is complete. To begin anew, remove this folder.\n'
JOB = 'job.json'
NAMES = re.compile(r'%s|job\.json(\.new)?|\d+\.npy(\.new)?|whole\.(npz|h5|hdf5)' % re.escape(MARKER), re.ASCII)


class UnfinishedOutput:
    """The rows of an output file that is not complete: a folder next to it, with one .npy file for each array.

    These files only grow, and their length is the number of finished rows: a process that is killed loses no complete
    row. A context manager that locks the folder against other processes.

    Parameters
    ----------
    path : str
        The output file. If it is a symbolic link, its target is written, and the folder is next to that.
    names : list of str
        Names of the arrays.
    length : int
        Rows of the complete file.
    job : dict
        What the rows depend on, as JSON can hold it. Rows of another job are discarded.

    Attributes
    ----------
    rows : int
        Finished rows: those that are complete in each array.
    """

    def __init__(self, path: str, names: list[str], length: int, job: dict[str, Any]) -> None:
        self.path, self.names, self.length = path, names, length
        self.target = output_target(path)
        self.folder = self.target + UNFINISHED
        self._job = dict(job, format=FORMAT, outputs=names)
        self._files: list[Any] = []
        self._is_finished = False

    def __enter__(self) -> UnfinishedOutput:
        self._own = UnfinishedFolder(self.folder, self.path)
        try:
            with writing(self.path, self.folder):
                if self._is_of_another_job():
                    self._own.begin(self._job)
                self.rows = min(self.length, *[whole_rows(part, self.length) for part in self._parts()])
        except BaseException:
            self._own.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()
        if self.rows == 0 and not self._is_finished:
            self._own.remove()
        self._own.close()

    def _parts(self):
        return [self._own.at('%d.npy' % number) for number in range(len(self.names))]

    def _is_of_another_job(self):
        job = self._own.job()
        if job is None:
            if any(map(os.path.exists, self._parts())):
                note('%s: the job of the rows in %s is not known, since its job.json is damaged: starting again'
                     % (self.path, self.folder))
            return True
        changed = sorted(key for key in self._job if job.get(key) != self._job[key])
        if changed:
            note('%s was begun with another %s: starting again' % (self.path, ' and '.join(changed)))
        return bool(changed)

    def append(self, outputs: list[np.ndarray]) -> None:
        """Write the next rows, one array of them for each array of the file."""
        if not self._files:
            self._files = [self._open(part, output) for part, output in zip(self._parts(), outputs)]
        for file, output in zip(self._files, outputs):
            data: np.ndarray = np.ascontiguousarray(output).reshape(-1).view('uint8')
            while data.size:  # an unbuffered write may be partial
                data = data[file.write(data):]
        self.rows += len(outputs[0])

    def _open(self, part, output):
        """Open an array's file for appending after its finished rows; they must match the output in shape and dtype."""
        whole = (self.length,) + output.shape[1:]
        if self.rows == 0:
            write_header(part, whole, output.dtype)
        shape, dtype, _ = layout(part)
        if (shape, dtype) != (whole, output.dtype):
            raise MgpuError('%s holds rows of shape %s and dtype %s, but the new rows %s and %s: remove it'
                            % (self.folder, shape[1:], dtype, whole[1:], output.dtype))
        cut_after(part, self.rows)
        return open(part, 'ab', buffering=0)

    def state(self) -> str:
        """Return a sentence that says how much is saved."""
        if self.rows == 0:
            return 'No samples are saved yet'
        return ('%d of %d samples are saved in %s: run the same command again to resume'
                % (self.rows, self.length, self.folder))

    def finish(self) -> None:
        """Move the complete file to its name, and remove the folder."""
        parts = dict(zip(self.names, self._parts()))
        for part in parts.values():
            cut_after(part, self.rows)
        kind = os.path.splitext(self.path)[1].lower()
        whole = self._own.at('whole' + kind)
        if kind == '.npy':
            whole, = parts.values()
        elif kind == '.npz':
            with zipfile.ZipFile(whole, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, part in parts.items():
                    archive.write(part, name + '.npy')
        else:
            import h5py
            with h5py.File(whole, 'w') as hdf5:
                for name, part in parts.items():
                    hdf5.create_dataset(name, data=np.load(part, mmap_mode='r'))
        with open(whole, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(whole, self.target)
        files.flush_folder(os.path.dirname(self.target))
        self._is_finished = True
        self._own.remove()


class UnfinishedFolder:
    """A folder of the package's own, locked for this process until `close`; made if it does not exist.

    Parameters
    ----------
    path : str
    output : str
        The output file, for messages.

    Raises
    ------
    MgpuError
        If the folder cannot be made, is in use, or has anything in it that the package did not write.
    """

    def __init__(self, path: str, output: str) -> None:
        self.path, self._output = path, output
        with writing(output, path):
            self._open()
            try:
                self._claim()
            except BaseException:
                self.close()
                raise

    def at(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def job(self) -> dict[str, Any] | None:
        """Return the job that the rows belong to; None if that cannot be told."""
        try:
            job = json.loads(self._content(JOB) or '')
        except (ValueError, RecursionError):
            return None
        return job if isinstance(job, dict) else None

    def begin(self, job: dict[str, Any]) -> None:
        """Remove all rows, and note the job that new ones belong to, as JSON can hold it."""
        for name in os.listdir(self.path):
            if name != MARKER:
                os.remove(self.at(name))
        self._write(JOB + '.new', json.dumps(job, indent=1))
        os.replace(self.at(JOB + '.new'), self.at(JOB))

    def remove(self) -> None:
        """Remove the folder, with all that the package has written in it."""
        for name in sorted(os.listdir(self.path), key=MARKER.__eq__):  # the marker last
            if self._is_own(name):
                os.remove(self.at(name))
        try:
            os.rmdir(self.path)
        except OSError as error:
            note('the folder %s stays: %s' % (self.path, error.strerror))

    def close(self) -> None:
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
                self.close()
                raise MgpuError('another process is writing %s: wait for it, or end it' % self._output) from error
            except FileNotFoundError:  # another process has just finished, and removed it
                pass
            self.close()

    def _claim(self):
        """Check that the folder is the package's own, and write the marker."""
        names, marker = set(os.listdir(self.path)), self._content(MARKER)
        foreign = sorted(name for name in names if not self._is_own(name))
        if foreign:
            self._refuse('has files in it that theano-mgpu did not write (%s)' % ', '.join(foreign[:5]))
        if names and (marker is None or not TEXT.startswith(marker)):  # a machine that stopped may have cut it short
            self._refuse('was not made by theano-mgpu (%s)' % ', '.join(sorted(names)[:5]))
        if marker != TEXT:
            self._write(MARKER, TEXT)

    def _is_own(self, name):
        """Return whether a file has a name of the package's own, and no other one, and is no link and no folder."""
        status = os.lstat(self.at(name))
        return bool(NAMES.fullmatch(name)) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def _content(self, name):
        """Return the text of a file; None without it, or if it is no text."""
        try:
            return Path(self.path, name).read_text(encoding='utf-8')
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def _write(self, name, text):
        with open(self.at(name), 'w') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _refuse(self, reason):
        raise MgpuError('%s %s: rows of %s are kept there while they are computed. Move it, or choose another name for '
                        'the output' % (self.path, reason, self._output))


@contextlib.contextmanager
def writing(output: str, place: str = '') -> Iterator[None]:
    """Make an OSError of the ``with`` block a MgpuError that names the output file, and the place of the error."""
    try:
        yield
    except OSError as error:
        raise MgpuError('the output %s cannot be written: %s%s'
                        % (output, place and place + ': ', error.strerror or error)) from error


def output_target(path: str) -> str:
    """Return the file that an output path stands for, the target of a link; a MgpuError if no file can be there."""
    with writing(path):
        target = files.target_of(path)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target + UNFINISHED)
    return target


def write_header(path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the header of an .npy file for the complete array."""
    with open(path + '.new', 'wb') as file:
        np.lib.format.write_array_header_1_0(file, {'shape': shape, 'fortran_order': False,
                                                    'descr': np.lib.format.dtype_to_descr(dtype)})
    os.replace(path + '.new', path)


def layout(path: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape and dtype of an .npy file, and the offset of its data in bytes."""
    with open(path, 'rb') as file:
        shape, _, dtype = read_header(file)
        return shape, dtype, file.tell()


def whole_rows(path: str, length: int) -> int:
    """Return the number of complete rows in the .npy file of an array of `length` rows; 0 if it is damaged."""
    try:
        shape, dtype, start = layout(path)
        rows = (os.path.getsize(path) - start) // max(1, n_bytes(shape[1:], dtype))
    except FileNotFoundError:
        return 0
    except Exception as error:  # NumPy raises errors of many classes for a damaged header
        note('%s is damaged (%s): starting again' % (path, error))
        return 0
    return rows if shape[:1] == (length,) else 0


def cut_after(path: str, rows: int) -> None:
    """Remove all that follows the first rows in an .npy file, such as a part of a row."""
    shape, dtype, start = layout(path)
    os.truncate(path, start + rows * n_bytes(shape[1:], dtype))
