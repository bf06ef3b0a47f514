"""Files of Keras, of any of its versions, with Python 3 and h5py 3.

Each function patches the module that it takes as its argument.
"""
from __future__ import annotations

import os
from typing import Any

import numpy as np

from .wrapping import wrap

_sharing = False  # whether other processes open the same files


def share_files() -> None:
    """Take into account that other processes run the same script."""
    global _sharing
    _sharing = True


class Text(str):
    """A text that can be decoded, as the bytes could that h5py 2 returned in its place."""

    def decode(self, encoding: str = 'utf-8', errors: str = 'strict') -> str:
        """Return the text."""
        return str(self)

    def __reduce__(self) -> Any:
        return str, (str(self),)


def give_equal_names_as_bytes(saving: Any) -> None:
    """Keep the names of weights as bytes where several weights have the same name.

    Keras 2.2.5 and later make such names unique by ``str(name)``, which in Python 3 is the text "b'name'". Without
    this, saving ends with "No conversion path for dtype('<U12')" on h5py 3; on h5py 2, loading an optimizer's weights
    ends with "'str' object has no attribute 'decode'".
    """
    if not hasattr(saving, '_uniquify'):
        return

    @wrap(saving)
    def _uniquify(original, names):
        return [name.encode('utf-8') for name in original([name.decode('utf-8') for name in names])]


def read_texts_that_can_be_decoded(h5py: Any) -> None:
    """Return the texts of attributes so that Keras can decode them: h5py 2 returned bytes, and h5py 3 returns str."""
    if not _is_3(h5py):
        return

    @wrap(h5py.AttributeManager)
    def __getitem__(original, self, name):
        value = original(self, name)
        if isinstance(value, np.ndarray) and value.dtype == object:
            texts = np.empty_like(value)  # of the same type of HDF5
            texts.flat = [_decodable(each) for each in value.flat]
            return texts
        return _decodable(value)

    @wrap(h5py.AttributeManager)
    def create(original, self, name, data, *args, **kwargs):  # h5py writes no other type than str itself
        return original(self, name, str(data) if type(data) is Text else data, *args, **kwargs)


def open_to_append(h5py: Any) -> None:
    """Open a file without a mode as h5py 2 did, to read and write where that can be, and restore its attributes.

    The ranks of a job open one that exists to read: the first that could write would lock it for the others.
    """
    if not _is_3(h5py):
        return
    h5py.Dataset.value = property(lambda dataset: dataset[()])
    h5py.File.fid = property(lambda file: file.id)

    @wrap(h5py.File)
    def __init__(original, self, name, mode=None, *args, **kwargs):
        is_shared = _sharing and isinstance(name, (str, os.PathLike)) and os.path.exists(name)
        try:
            original(self, name, mode or ('r' if is_shared else 'a'), *args, **kwargs)
        except OSError:
            if mode:
                raise
            original(self, name, 'r', *args, **kwargs)


def open_matrices_to_read(io_utils: Any) -> None:
    """Open the file of an ``HDF5Matrix`` to read, which is all that it does: several processes may have it open."""
    @wrap(io_utils.HDF5Matrix)
    def __init__(original, self, datapath, *args, **kwargs):
        if datapath not in self.refs:
            self.refs[datapath] = io_utils.h5py.File(datapath, 'r')
        original(self, datapath, *args, **kwargs)


def read_names_as_lists(io_utils: Any) -> None:
    """Return the names that an attribute has as a list: Keras 2.2.3 and 2.2.4 ask whether there are any."""
    if not hasattr(io_utils, 'H5Dict') or not _is_3(io_utils.h5py):
        return

    @wrap(io_utils.H5Dict)
    def __getitem__(original, self, attr):
        value = original(self, attr)
        return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def _is_3(h5py):
    return h5py is not None and int(h5py.__version__.split('.')[0]) >= 3


def _decodable(value):
    return Text(value) if type(value) is str else value
