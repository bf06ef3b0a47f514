"""Arrays in .npy and .h5 files, read a few rows at a time, and in .npz files, read whole."""
from __future__ import annotations

import contextlib
import math
import os
import zipfile
from typing import Any, Iterator

import numpy as np

from ..errors import MgpuError
from .hdf5_check import check_hdf5

CHUNK = 1 << 24  # bytes that are read at a time


class InputError(MgpuError):
    """An input file cannot be read."""


def kind_of(path: str, role: str) -> str:
    """Return the extension of a file name; raise a MgpuError unless it is one of `KINDS`."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in KINDS:
        raise MgpuError('%s: the name of the %s must end with one of %s' % (path, role, ', '.join(KINDS)))
    return kind


@contextlib.contextmanager
def open_inputs(path: str, names: list[str]) -> Iterator[list[Any]]:
    """Open the arrays of a file for a model's inputs; yield them in the order of these, to be sliced along axis 0.

    Arrays in an .npz or .h5 file have the names of the inputs; a single array may have any name. Raises an MgpuError if
    the file cannot be read, if its arrays do not match the inputs, or if they differ in length.
    """
    kind = kind_of(path, 'input')
    with contextlib.ExitStack() as stack:
        with reading(path):
            arrays = in_order(path, KINDS[kind](path, stack), names)
            for name, array in zip(names, arrays):
                if array.dtype.kind not in 'biuf':
                    raise ValueError('the array for %s has dtype %s, not numbers' % (name, array.dtype))
        lengths = {array.shape[:1] for array in arrays}
        if () in lengths or len(lengths) > 1:
            raise MgpuError('%s: all inputs need the same number of samples along their first axis: %s'
                            % (path, ', '.join('%s has shape %s' % (name, tuple(array.shape))
                                               for name, array in zip(names, arrays))))
        yield arrays


@contextlib.contextmanager
def reading(path: str, where: str = '') -> Iterator[None]:
    """Make any error of the ``with`` block an InputError: libraries raise errors of many classes for damaged files."""
    try:
        yield
    except MgpuError:
        raise
    except Exception as error:
        # Not the cause: the file is wrong, not the code.
        raise InputError('the input %s cannot be read%s: %s'
                         % (path, where, ' '.join(str(error).split()) or type(error).__name__)) from None


def in_order(path: str, arrays: dict[str, Any], names: list[str]) -> list[Any]:
    """Return the arrays of a file in the order of the inputs.

    Examples
    --------
    >>> in_order('x.npz', {'any': 1}, ['input_1']), in_order('x.npz', {'b': 1, 'a': 2, 'c': 3}, ['a', 'b'])
    ([1], [2, 1])
    """
    if len(names) == 1 and len(arrays) == 1:
        return list(arrays.values())
    if arrays.keys() >= set(names):
        return [arrays[name] for name in names]
    if path.endswith('.npy'):
        raise MgpuError('%s is one array, but the model has the inputs %s: give an .npz or .h5 file with arrays of '
                        'these names' % (path, ', '.join(names)))
    raise MgpuError('%s has the arrays %s, but the model has the inputs %s: give each array the name of its input'
                    % (path, ', '.join(sorted(arrays)) or '(none)', ', '.join(names)))


def open_npy(path: str, stack: contextlib.ExitStack) -> dict[str, np.ndarray]:
    """Map the array of an .npy file into memory."""
    array = np.lib.format.open_memmap(path, mode='r')
    check_size(os.path.getsize(path) - array.offset, array.shape, array.dtype)
    return {'array': array}


def open_npz(path: str, stack: contextlib.ExitStack) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith('.npy'):
                with archive.open(name) as stream:
                    arrays[name[:-len('.npy')]] = np.lib.format.read_array(stream)
                    while stream.read(CHUNK):  # zipfile compares the checksum at the end
                        pass
    return arrays


def check_size(size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise a ValueError unless an array has so many bytes."""
    expected = math.prod(shape, start=dtype.itemsize)  # however many: a header may be damaged
    if size != expected:
        raise ValueError('by its header it has the shape %s and dtype %s, which are %d bytes, but there are %d'
                         % (shape, dtype, expected, size))


def open_h5(path: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Open the arrays of an HDF5 file."""
    import h5py
    check_hdf5(path)
    file = stack.enter_context(h5py.File(path, 'r'))
    arrays = {name: item for name, item in file.items() if isinstance(item, h5py.Dataset) and item.shape is not None}
    for array in arrays.values():
        stored = array.id.get_storage_size()
        if array.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and stored:  # 0 if it was never written to
            check_size(stored, array.shape, array.dtype)
    return arrays


KINDS = {'.npy': open_npy, '.npz': open_npz, '.h5': open_h5, '.hdf5': open_h5}
