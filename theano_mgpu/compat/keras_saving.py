"""Keras 2.3.1's files with Python 3 and h5py 3.

Each function patches the module ``keras.engine.saving``, which it takes as its argument.
"""
from __future__ import annotations

import sys
from typing import Any

from .wrapping import wrap

LOADERS = ('load_attributes_from_hdf5_group', 'load_weights_from_hdf5_group', 'load_weights_from_hdf5_group_by_name')


def give_equal_names_as_bytes(saving: Any) -> None:
    """Keep the names of weights as bytes where several weights have the same name.

    Keras 2.3.1 makes such names unique by ``str(name)``, which in Python 3 is the text "b'name'". Without this, saving
    ends with "No conversion path for dtype('<U12')" on h5py 3; on h5py 2, loading an optimizer's weights ends with
    "'str' object has no attribute 'decode'".
    """
    @wrap(saving)
    def _uniquify(original, names):
        return [name.encode('utf-8') for name in original([name.decode('utf-8') for name in names])]


def save_to_streams(saving: Any) -> None:
    """Open in-memory files for writing: h5py 3 opens files for reading by default, and Keras 2.3.1 passes no mode.

    Without this, ``model.save`` to a BytesIO or an open file ends with "unable to open file".
    """
    if not _is_h5py_3(saving.h5py):
        return

    @wrap(saving)
    def save_to_binary_h5py(original, save_function, stream):
        with saving.h5py.File('in-memory-h5py', 'w', driver='core', backing_store=False) as f:
            result = save_function(f)
            f.flush()
            stream.write(f.id.get_file_image())
        return result

    vars(sys.modules[save_to_binary_h5py.__module__]).update(save_to_binary_h5py=save_to_binary_h5py)


def read_attributes_as_bytes(saving: Any) -> None:
    """Return text attributes as bytes, as h5py 2 did: Keras 2.3.1 decodes them, and h5py 3 returns str.

    Without this, load_model and load_weights end with "'str' object has no attribute 'decode'".
    """
    if not _is_h5py_3(saving.h5py):
        return

    @wrap(saving.H5Dict)
    def __getitem__(original, self, attr):
        value = original(self, attr)
        return value if isinstance(self.data, dict) else _as_bytes(value)

    for name in LOADERS:
        @wrap(saving, name)
        def load(original, f, *args, **kwargs):
            return original(_BytesGroup(f), *args, **kwargs)


def _is_h5py_3(h5py):
    return h5py is not None and int(h5py.__version__.split('.')[0]) >= 3


def _as_bytes(value):
    """Return a text as h5py 2 returned it; any other value unchanged."""
    if isinstance(value, str):
        return value.encode('utf-8')
    if getattr(getattr(value, 'dtype', None), 'kind', None) == 'O':
        return [_as_bytes(item) for item in value]
    return value


class _BytesGroup:
    """An h5py group whose attributes, and the attributes of its members, are read as bytes."""

    def __init__(self, group):
        self._group = group
        self.attrs = {name: _as_bytes(value) for name, value in group.attrs.items()}

    def __getitem__(self, name):
        member = self._group[name]
        return _BytesGroup(member) if hasattr(member, 'keys') else member

    def __contains__(self, name):
        return name in self._group
