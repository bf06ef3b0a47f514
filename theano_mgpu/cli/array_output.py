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
from ..utils import files, owned
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
        self._parts = [self._at('%d.npy' % number) for number in range(len(names))]
        self._files: list[Any] = []
        self._is_finished = False

    def __enter__(self) -> UnfinishedOutput:
        with writing(self.path, self.folder), contextlib.ExitStack() as stack:
            stack.callback(os.close, owned.locked(self.folder, self._opened, self._lock))
            self._claim()
            if self._is_of_another_job():
                self._begin()
            self.rows = min(self.length, *[whole_rows(part, self.length) for part in self._parts])
            self._unlock = stack.pop_all().close
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()
        if self.rows == 0 or self._is_finished:
            self._remove()
        self._unlock()

    def _at(self, name):
        return os.path.join(self.folder, name)

    def _opened(self, folder):
        """Make the folder if there is none, and open it."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if os.path.islink(folder) or not os.path.isdir(folder):
            self._refuse('is no folder, but a link or a file')
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def _lock(self, descriptor, operation):
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError as error:
            raise MgpuError('another process is writing %s: wait for it, or end it' % self.path) from error

    def _claim(self):
        """Check that the folder is the package's own, and write the marker."""
        names = sorted(os.listdir(self.folder))
        foreign = [name for name in names if not self._is_own(name)]
        if foreign:
            self._refuse('has files in it that theano-mgpu did not write (%s)' % ', '.join(foreign[:5]))
        marker = Path(self._at(MARKER))
        # A machine that stopped may have cut the marker short.
        if names and not (MARKER in names and TEXT.encode().startswith(marker.read_bytes())):
            self._refuse('was not made by theano-mgpu (%s)' % ', '.join(names[:5]))
        marker.write_text(TEXT)

    def _is_own(self, name):
        """Return whether a file has a name of the package's own, and no other one, and is no link and no folder."""
        status = os.lstat(self._at(name))
        return bool(NAMES.fullmatch(name)) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def _refuse(self, reason):
        raise MgpuError('%s %s: rows of %s are kept there while they are computed. Move it, or choose another name for '
                        'the output' % (self.folder, reason, self.path))

    def _is_of_another_job(self):
        """Return whether the rows belong to another job, or it cannot be told to which one."""
        job = None
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            job = json.loads(Path(self._at(JOB)).read_text(encoding='utf-8'))
        if not isinstance(job, dict):
            if any(map(os.path.exists, self._parts)):
                note('%s: the job of the rows in %s is not known, since its job.json is damaged: starting again'
                     % (self.path, self.folder))
            return True
        changed = sorted(key for key in self._job if job.get(key) != self._job[key])
        if changed:
            note('%s was begun with another %s: starting again' % (self.path, ' and '.join(changed)))
        return bool(changed)

    def _begin(self):
        """Remove all rows, and note the job that new ones belong to, as JSON can hold it."""
        for name in os.listdir(self.folder):
            if name != MARKER:
                os.remove(self._at(name))
        Path(self._at(JOB)).write_text(json.dumps(self._job, indent=1))

    def _remove(self):
        """Remove the folder, with all that the package has written in it."""
        try:
            for name in sorted(os.listdir(self.folder), key=MARKER.__eq__):  # the marker last
                if self._is_own(name):
                    os.remove(self._at(name))
            os.rmdir(self.folder)
        except OSError as error:
            note('the folder %s stays: %s' % (self.folder, error.strerror))

    def append(self, outputs: list[np.ndarray]) -> None:
        """Write the next rows, one array of them for each array of the file."""
        if not self._files:
            self._files = [self._open(part, output) for part, output in zip(self._parts, outputs)]
        for file, output in zip(self._files, outputs):
            data: np.ndarray = np.ascontiguousarray(output).reshape(-1).view('uint8')
            while data.size:  # an unbuffered write may be partial
                data = data[file.write(data):]
        self.rows += len(outputs[0])

    def _open(self, part, output):
        """Open an array's file for appending after its finished rows; they must match the output in shape and dtype."""
        whole = (self.length,) + output.shape[1:]
        if self.rows == 0:
            with open(part, 'wb') as file:
                np.lib.format.write_array_header_1_0(file, {'shape': whole, 'fortran_order': False, 'descr':
                                                            np.lib.format.dtype_to_descr(output.dtype)})
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
        """Move the complete file to its name; the folder is removed at the end."""
        parts = dict(zip(self.names, self._parts))
        for part in parts.values():
            cut_after(part, self.rows)
        kind = os.path.splitext(self.path)[1].lower()
        whole = self._at('whole' + kind)
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
        files.flush_file(whole)
        os.replace(whole, self.target)
        files.flush_folder(os.path.dirname(self.target))
        self._is_finished = True


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
