"""Output files written row by row: a file is complete or absent, and an interrupted one can be resumed."""
import contextlib
import os
import zipfile

import numpy as np

from ..errors import MgpuError
from ..utils import files
from .array_input import read_header
from .output import note
from .unfinished_folder import UnfinishedFolder

FORMAT = 1
UNFINISHED = '.unfinished'


class UnfinishedOutput:
    """The rows of an output file that is not complete: a folder next to it, with one .npy file for each array.

    These files only grow, and their length is the number of finished rows: a process that is killed loses no complete
    row. A context manager that locks the folder against other processes.

    Parameters
    ----------
    path : str
        Of the output file. If it is a symbolic link, its target is written, and the folder is next to that.
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
        self.target = output_target(path)
        self.folder = self.target + UNFINISHED
        self._job = dict(job, format=FORMAT, outputs=names)
        self._files = []
        self._finished = False

    def __enter__(self):
        self._own = UnfinishedFolder(self.folder, self.path, self._job)
        try:
            if self._is_of_another_job():
                self._own.begin()
            self.rows = min(self.length, *[whole_rows(path, self.length) for path in self._parts()])
        except BaseException as error:
            self._own.close()
            if isinstance(error, OSError):
                raise MgpuError('the output %s cannot be written: %s' % (self.path, error)) from error
            raise
        return self

    def __exit__(self, *error):
        for file in self._files:
            file.close()
        if self.rows == 0 and not self._finished:
            self._own.remove()
        self._own.close()

    def _parts(self):
        return [self._own.at('%d.npy' % number) for number in range(len(self.names))]

    def _is_of_another_job(self):
        found = self._own.job()
        if found is None:
            if any(map(os.path.exists, self._parts())):
                note('%s: the job of the rows in %s is not known, since its job.json is damaged: starting again'
                     % (self.path, self.folder))
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
        if (shape, dtype) != (whole, output.dtype):
            raise MgpuError('%s holds rows of shape %s and dtype %s, but the new rows %s and %s: remove it'
                            % (self.folder, shape[1:], dtype, whole[1:], output.dtype))
        cut_after(path, self.rows)
        return open(path, 'ab', buffering=0)

    def state(self):
        """A sentence that says how much is saved."""
        if self.rows == 0:
            return 'No samples are saved yet'
        return ('%d of %d samples are saved in %s: run the same command again to resume'
                % (self.rows, self.length, self.folder))

    def finish(self):
        """Move the complete file to its name, and remove the folder."""
        for path in self._parts():
            cut_after(path, self.rows)
        kind = os.path.splitext(self.path)[1].lower()
        whole = self._own.at('whole' + kind)
        if kind == '.npy':
            whole, = self._parts()
        elif kind == '.npz':
            with zipfile.ZipFile(whole, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, part in zip(self.names, self._parts()):
                    archive.write(part, name + '.npy')
        else:
            copy_to_h5(whole, dict(zip(self.names, self._parts())))
        with open(whole, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(whole, self.target)
        files.flush_folder(os.path.dirname(self.target))
        self._finished = True
        self._own.remove()


def output_target(path):
    """Return the file that an output path stands for, the target of a link; a MgpuError if no file can be there."""
    try:
        target = files.target_of(path)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target + UNFINISHED)
    except OSError as error:
        raise MgpuError('the output %s cannot be written: %s' % (path, error.strerror or error)) from error
    return target


def write_header(path, shape, dtype):
    """Write the header of an .npy file for the complete array."""
    with open(path + '.new', 'wb') as file:
        np.lib.format.write_array_header_1_0(file, {'shape': shape, 'fortran_order': False,
                                                    'descr': np.lib.format.dtype_to_descr(np.dtype(dtype))})
    os.replace(path + '.new', path)


def whole_rows(path, length):
    """Return the number of complete rows in the .npy file of an array of `length` rows; 0 if it is damaged."""
    try:
        with open(path, 'rb') as file:
            shape, _, dtype = read_header(file)
            found = (os.path.getsize(path) - file.tell()) // max(1, row_bytes(shape, dtype))
    except FileNotFoundError:
        return 0
    except Exception as error:  # NumPy raises errors of many classes for a damaged header
        note('%s is damaged (%s): starting again' % (path, error))
        return 0
    return found if shape[:1] == (length,) else 0


def cut_after(path, rows):
    """Remove what follows the first rows in an .npy file, such as a part of a row."""
    with open(path, 'rb') as file:
        shape, _, dtype = read_header(file)
        start = file.tell()
    os.truncate(path, start + rows * row_bytes(shape, dtype))


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
