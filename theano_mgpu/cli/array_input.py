"""Arrays in .npy, .npz and .h5 files, read a few rows at a time."""
import contextlib
import os
import struct
import zipfile

import numpy as np

from ..errors import MgpuError

KINDS = ('.npy', '.npz', '.h5', '.hdf5')
CHUNK = 1 << 24  # bytes that are skipped at a time


def kind_of(path, what):
    """The extension of a file name; a MgpuError unless it is one of `KINDS`."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in KINDS:
        raise MgpuError('%s: the name of the %s must end with one of %s' % (path, what, ', '.join(KINDS)))
    return kind


@contextlib.contextmanager
def open_inputs(path, names):
    """Open the arrays of a file for a model's inputs.

    Parameters
    ----------
    path : str
    names : list of str
        Of the inputs. Arrays in an .npz or .h5 file have these names; a single array may have any name.

    Yields
    ------
    list of array_like
        In the order of the names. Each has a shape and can be sliced along axis 0, in increasing order.

    Raises
    ------
    MgpuError
        If the file is missing or cannot be read, if its arrays do not match the inputs, or if they differ in length.
    """
    kind = kind_of(path, 'input')
    if not os.path.isfile(path):
        raise MgpuError('there is no input file %s' % path)
    with contextlib.ExitStack() as stack:
        try:
            arrays = OPENERS[kind](path, stack)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise MgpuError('the input %s cannot be read: %s' % (path, error)) from error
        found = in_order(path, arrays, names)
        lengths = [array.shape[0] if array.shape else None for array in found]
        if None in lengths or len(set(lengths)) > 1:
            raise MgpuError('%s: all inputs need the same number of samples along their first axis: %s'
                            % (path, ', '.join('%s has shape %s' % (name, tuple(array.shape))
                                               for name, array in zip(names, found))))
        yield found


def in_order(path, arrays, names):
    """Arrays of a file in the order of the inputs.

    Examples
    --------
    >>> in_order('x.npz', {'any': 1}, ['input_1']), in_order('x.npz', {'b': 1, 'a': 2, 'c': 3}, ['a', 'b'])
    ([1], [2, 1])
    """
    if len(names) == 1 and len(arrays) == 1:
        return list(arrays.values())
    missing = [name for name in names if name not in arrays]
    if missing:
        raise MgpuError('%s has the arrays %s, but the model has the inputs %s: give each array the name of its input'
                        % (path, ', '.join(sorted(arrays)) or '(none)', ', '.join(names))
                        if not path.endswith('.npy') else
                        '%s is one array, but the model has the inputs %s: give an .npz or .h5 file with arrays of '
                        'these names' % (path, ', '.join(names)))
    return [arrays[name] for name in names]


def open_npy(path, stack):
    return {'array': np.load(path, mmap_mode='r', allow_pickle=False)}


def open_npz(path, stack):
    archive = stack.enter_context(zipfile.ZipFile(path))
    members = {info.filename[:-len('.npy')]: info for info in archive.infolist() if info.filename.endswith('.npy')}
    return {name: member_of(path, archive, info, stack) for name, info in members.items()}


def member_of(path, archive, info, stack):
    """One array of an .npz file: memory-mapped, if it is not compressed."""
    stream = stack.enter_context(archive.open(info))
    shape, fortran_order, dtype = read_header(stream)
    if info.compress_type == zipfile.ZIP_STORED:
        offset = data_offset(path, info) + stream.tell()
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, 'r', offset, shape, order='F' if fortran_order else 'C')
    if fortran_order:  # its rows are not contiguous in the file
        return np.lib.format.read_array(stack.enter_context(archive.open(info)), allow_pickle=False)
    return Stream(stream, shape, dtype)


def read_header(stream):
    """Shape, Fortran order (bool) and dtype of an .npy file or member; leave the stream at its data."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError('it contains Python objects, not numbers')
    return shape, fortran_order, dtype


def data_offset(path, info):
    """Where a member's data begin: after its local header, whose lengths may differ from those in the directory."""
    with open(path, 'rb') as file:
        file.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack('<HH', file.read(4))
    return info.header_offset + 30 + name_length + extra_length


class Stream:
    """Rows of a compressed array, which can be read only once and in increasing order.

    Parameters
    ----------
    stream : file
        At the first row.
    shape : tuple of int
    dtype : numpy.dtype
    """

    def __init__(self, stream, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self._stream = stream
        self._row = 0
        self._row_bytes = int(np.prod(shape[1:], dtype='int64')) * dtype.itemsize

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(self.shape[0])
        if start < self._row:
            raise ValueError('row %d has been read already' % start)
        skipped = (start - self._row) * self._row_bytes
        while skipped:
            skipped -= len(self._stream.read(min(skipped, CHUNK)))
        data = self._stream.read((stop - start) * self._row_bytes)
        self._row = stop
        return np.frombuffer(data, self.dtype).reshape((stop - start,) + tuple(self.shape[1:]))


def open_h5(path, stack):
    import h5py
    file = stack.enter_context(h5py.File(path, 'r'))
    return {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}


OPENERS = {'.npy': open_npy, '.npz': open_npz, '.h5': open_h5, '.hdf5': open_h5}
