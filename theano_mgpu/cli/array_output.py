"""Output files written row by row: a file is complete or absent, and an interrupted one can be resumed.

The rows of an output that is not complete are in a file beside it. A line in words begins it, by which the package
knows its own files; a line of JSON says what the rows depend on, and their layout.
"""
from __future__ import annotations

import contextlib
import json
import os
import zipfile
from typing import Any, Callable, Iterator

import numpy as np

from ..errors import MgpuError
from ..utils import files, owned
from .array_input import CHUNK
from .output import note

FORMAT = 1
UNFINISHED = '.unfinished'
TEXT = b'theano-mgpu predict keeps the rows of a file here until that is complete. To begin anew, remove this file.\n'


class UnfinishedOutput:
    """The rows of an output file that is not complete: a file next to it, each row with its part of all arrays.

    This file only grows, and its length gives the number of finished `rows`: a process that is killed loses no complete
    row. A context manager that locks the file against other processes. If the output is a symbolic link, its target is
    written, and the rows are next to that. The `job` has all that the rows depend on, as JSON can hold it; rows of
    another job are discarded.
    """

    def __init__(self, path: str, names: list[str], length: int, job: dict[str, Any]) -> None:
        self.path, self.names, self.length = path, names, length
        self.target = os.path.abspath(output_target(path))  # code of the model may change the current folder
        self.place = self.target + UNFINISHED
        self._job = dict(job, format=FORMAT, outputs=names)
        self._fields: list[Any] = []  # the dtype and the shape of each part of a row
        self._start = 0  # bytes before the first row
        self.rows = 0

    def __enter__(self) -> UnfinishedOutput:
        with writing(self.path, self.place):
            try:
                self._file: Any = open(owned.locked(self.place, is_own), 'r+b', buffering=0)
            except BlockingIOError as error:
                raise MgpuError('another process is writing %s: wait for it, or end it' % self.path) from error
            except FileExistsError as error:
                raise MgpuError('%s was not made by theano-mgpu: rows of %s are kept there while they are computed. '
                                'Move it, or choose another name for the output' % (self.place, self.path)) from error
            self._resume()
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows == 0:
            owned.remove(self._file.fileno(), self.place)
        self._file.close()

    def _resume(self):
        """Count the finished rows, unless they belong to another job, or it cannot be told to which one."""
        with open(self.place, 'rb') as file:
            file.readline(len(TEXT))
            line = file.readline(CHUNK)  # a damaged file may have no end of a line
        if not line:
            return
        try:
            job, fields = json.loads(line)
            size = layout_of(fields).itemsize
            changed = sorted(key for key in self._job if job.get(key) != self._job[key])
        except Exception:  # there are errors of many classes for damaged content
            note('%s: the job of the rows in %s is not known, since it is damaged: starting again'
                 % (self.path, self.place))
            return
        if changed:
            note('%s was begun with another %s: starting again' % (self.path, ' and '.join(changed)))
            return
        self._fields, self._start = fields, len(TEXT) + len(line)
        self.rows = min(self.length, (os.path.getsize(self.place) - self._start) // max(1, size))

    def _write(self, data, offset):
        self._file.seek(offset)
        while data:  # an unbuffered write may be partial
            data = data[self._file.write(data):]

    def append(self, outputs: list[np.ndarray]) -> None:
        """Write the next rows, one array of them for each array of the file."""
        fields = [[output.dtype.name, list(output.shape[1:])] for output in outputs]
        if self.rows == 0:
            header = TEXT + json.dumps([self._job, fields]).encode() + b'\n'
            self._file.truncate(0)
            self._write(header, 0)
            self._fields, self._start = fields, len(header)
        elif fields != self._fields:
            raise MgpuError('%s holds rows of %s, but the new rows are of %s: remove it'
                            % (self.place, described(self._fields), described(fields)))
        rows = np.empty(len(outputs[0]), layout_of(fields))
        for number, output in enumerate(outputs):
            rows['f%d' % number] = output
        self._write(rows.tobytes(), self._start + self.rows * rows.itemsize)
        self.rows += len(rows)

    def state(self) -> str:
        """Return a sentence that says how much is saved."""
        if self.rows == 0:
            return 'No samples are saved yet'
        return ('%d of %d samples are saved in %s: run the same command again to resume'
                % (self.rows, self.length, self.place))

    def finish(self) -> None:
        """Write the complete file, and remove the file of the rows."""
        kind = os.path.splitext(self.path)[1].lower()
        rows = np.memmap(self._file, layout_of(self._fields), 'r', self._start, (self.length,))
        arrays = {name: rows['f%d' % number] for number, name in enumerate(self.names)}
        with files.whole_file(self.target) as whole:
            if kind == '.npy':
                with open(whole, 'w+b') as file:  # with 'wb', NumPy's error does not say that the disk is full
                    np.lib.format.write_array(file, *arrays.values())
            elif kind == '.npz':
                with zipfile.ZipFile(whole, 'w') as archive:
                    for name, array in arrays.items():
                        with archive.open(name + '.npy', 'w', force_zip64=True) as member:
                            np.lib.format.write_array(member, array)
            else:
                import h5py
                with h5py.File(whole, 'w') as hdf5:
                    for name, array in arrays.items():
                        dataset = hdf5.create_dataset(name, array.shape, array.dtype)
                        step = max(1, CHUNK // max(1, rows.itemsize))  # rows that h5py copies at a time
                        for start in range(0, self.length, step):
                            dataset[start:start + step] = array[start:start + step]
        owned.remove(self._file.fileno(), self.place)


def is_own(content: bytes) -> bool:
    """Return whether the package made a file with this content; a machine that stopped may have cut it short."""
    return content.startswith(TEXT) or TEXT.startswith(content)


def layout_of(fields: list[Any]) -> np.dtype:
    """Return the dtype of a row whose parts, f0 and so on, have these dtypes and shapes."""
    layout = np.dtype([('f%d' % number, dtype, tuple(shape)) for number, (dtype, shape) in enumerate(fields)])
    if layout.hasobject:  # its bytes would be taken for addresses
        raise ValueError('rows have objects')
    return layout


def described(fields: list[Any]) -> str:
    """Return the shape and dtype of each part of a row, in words."""
    return ', '.join('shape %s and dtype %s' % (tuple(shape), dtype) for dtype, shape in fields)


@contextlib.contextmanager
def writing(output: str, place: str = '', state: Callable[[], str] | None = None) -> Iterator[None]:
    """Make an OSError of the ``with`` block a MgpuError that names the output file.

    `place` is the file that cannot be written, if it is another one; ``state()`` says how much is saved.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ or error  # an error of `utils.files` names the file, too
        reason = getattr(cause, 'strerror', None) or cause
        raise MgpuError('the output %s cannot be written: %s%s%s' % (output, place and place + ': ', reason,
                                                                     '. ' + state() if state else '')) from error


def output_target(path: str) -> str:
    """Return the file that an output path stands for, the target of a link; a MgpuError if no file can be there."""
    with writing(path):
        target = files.target_of(path)
        files.check_folder(target)
        files.check_writable(target)
    return target
