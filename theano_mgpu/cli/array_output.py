"""Output files written row by row: a file is complete or absent, and an interrupted one can be resumed."""
import contextlib
import fcntl
import json
import os
import shutil
import zipfile

import numpy as np

from ..errors import MgpuError
from .array_input import read_header
from .output import note

FORMAT = 1


class UnfinishedOutput:
    """The rows of an output file that is not complete: a folder next to it, with one .npy file for each array.

    These files only grow, and their length is the number of finished rows: a process that is killed loses no complete
    row. A context manager that locks the folder against other processes.

    Parameters
    ----------
    path : str
        Of the output file.
    names : list of str
        Of the arrays.
    length : int
        Rows of the complete file.
    job : dict
        What the rows depend on, as JSON can hold it. Rows of another job are discarded.

    Attributes
    ----------
    rows : int
        Finished rows: those that are complete in each array.
    """

    def __init__(self, path, names, length, job):
        self.path, self.names, self.length = path, names, length
        self.folder = path + '.unfinished'
        self._job = dict(job, format=FORMAT, outputs=names)
        self._files = []

    def __enter__(self):
        os.makedirs(self.folder, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise MgpuError('another process is writing %s: wait for it, or end it' % self.path) from error
        if self._is_of_another_job():
            for name in os.listdir(self.folder):
                os.remove(os.path.join(self.folder, name))
        if not os.path.exists(self._at('job.json')):
            with open(self._at('job.json.new'), 'w') as file:
                json.dump(self._job, file, indent=1)
            os.replace(self._at('job.json.new'), self._at('job.json'))
        self.rows = min(map(whole_rows, self._parts()))
        return self

    def __exit__(self, *error):
        for file in self._files:
            file.close()
        if self.rows == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # `finish` has removed the folder of a complete file
        os.close(self._lock)

    def _at(self, name):
        return os.path.join(self.folder, name)

    def _parts(self):
        return [self._at('%d.npy' % number) for number in range(len(self.names))]

    def _is_of_another_job(self):
        try:
            with open(self._at('job.json')) as file:
                found = json.load(file)
        except FileNotFoundError:
            return True
        changed = sorted(key for key in self._job if found.get(key) != self._job[key])
        if changed:
            note('%s was begun with another %s: starting again' % (self.path, ' and '.join(changed)))
        return bool(changed)

    def append(self, outputs):
        """Write the next rows: a list with one ndarray for each array."""
        if not self._files:
            self._files = [self._open(path, output) for path, output in zip(self._parts(), outputs)]
        for file, output in zip(self._files, outputs):
            data = np.ascontiguousarray(output).reshape(-1).view('uint8')
            while data.size:  # an unbuffered write may be partial
                data = data[file.write(data):]
        self.rows += len(outputs[0])

    def _open(self, path, output):
        """Open an array's file for appending after its finished rows; they must match the output in shape and dtype."""
        whole = (self.length,) + output.shape[1:]
        if self.rows == 0:
            write_header(path, whole, output.dtype)
        with open(path, 'rb') as file:
            shape, _, dtype = read_header(file)
            start = file.tell()
        if (shape, dtype) != (whole, output.dtype):
            raise MgpuError('%s holds rows of shape %s and dtype %s, but the new rows %s and %s: remove it'
                            % (self.folder, shape[1:], dtype, whole[1:], output.dtype))
        os.truncate(path, start + self.rows * row_bytes(shape, dtype))
        return open(path, 'ab', buffering=0)

    def state(self):
        """A sentence that says how much is saved."""
        if self.rows == 0:
            return 'No samples are saved yet'
        return ('%d of %d samples are saved in %s: run the same command again to resume'
                % (self.rows, self.length, self.folder))

    def finish(self):
        """Move the complete file to its name, and remove the folder."""
        for file in self._files:
            os.fsync(file.fileno())
        kind = os.path.splitext(self.path)[1].lower()
        whole = self._at('whole' + kind)
        if kind == '.npy':
            whole, = self._parts()
        elif kind == '.npz':
            with zipfile.ZipFile(whole, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, part in zip(self.names, self._parts()):
                    archive.write(part, name + '.npy')
        else:
            copy_to_h5(whole, dict(zip(self.names, self._parts())))
        os.replace(whole, self.path)
        shutil.rmtree(self.folder)


def write_header(path, shape, dtype):
    """Write the header of an .npy file for the complete array."""
    with open(path + '.new', 'wb') as file:
        np.lib.format.write_array_header_1_0(file, {'shape': shape, 'fortran_order': False,
                                                    'descr': np.lib.format.dtype_to_descr(np.dtype(dtype))})
    os.replace(path + '.new', path)


def whole_rows(path):
    """The number of complete rows in an .npy file."""
    with contextlib.suppress(FileNotFoundError), open(path, 'rb') as file:
        shape, _, dtype = read_header(file)
        return (os.path.getsize(path) - file.tell()) // max(1, row_bytes(shape, dtype))
    return 0


def row_bytes(shape, dtype):
    """Bytes of a row.

    Examples
    --------
    >>> row_bytes((5, 3, 2), np.dtype('float32'))
    24
    """
    return int(np.prod(shape[1:], dtype='int64')) * dtype.itemsize


def copy_to_h5(path, parts):
    """Write .npy files as the datasets of an HDF5 file."""
    import h5py
    with h5py.File(path, 'w') as file:
        for name, part in parts.items():
            file.create_dataset(name, data=np.load(part, mmap_mode='r'))
