"""Keras's files with Python 3 and h5py 3."""
import functools
import sys


def mend_keras_saving(saving):
    """Mend ``keras.engine.saving`` for Python 3 and, where that is the h5py, for h5py 3."""
    give_equal_names_as_bytes(saving)
    if saving.h5py is not None and int(saving.h5py.__version__.split('.')[0]) >= 3:
        read_attributes_as_bytes(saving)
        save_to_streams(saving)


def give_equal_names_as_bytes(saving):
    """Keras 2.3.1 tells weights of one name apart with ``str(name)``, which in Python 3 is "b'name'", no bytes.

    Without this, saving them ends with "No conversion path for dtype('<U12')" on h5py 3; on h5py 2
    it is loading an optimizer's that ends, with "'str' object has no attribute 'decode'".
    """
    original = saving._uniquify

    @functools.wraps(original)
    def _uniquify(names):
        return [name.encode('utf-8') for name in original([name.decode('utf-8') for name in names])]

    saving._uniquify = _uniquify


def save_to_streams(saving):
    """h5py 3 opens files for reading unless told otherwise; Keras 2.3.1 does not say that it will write.

    Without this, ``model.save`` to a BytesIO or an open file ends with "unable to open file".
    """
    original = saving.save_to_binary_h5py

    @functools.wraps(original)
    def save_to_binary_h5py(save_function, stream):
        with saving.h5py.File('in-memory-h5py', 'w', driver='core', backing_store=False) as f:
            result = save_function(f)
            f.flush()
            stream.write(f.id.get_file_image())
        return result

    saving.save_to_binary_h5py = sys.modules[original.__module__].save_to_binary_h5py = save_to_binary_h5py


def read_attributes_as_bytes(saving):
    """h5py 3 gives text attributes as str; Keras 2.3.1 decodes them, as h5py 2 gave bytes.

    Without this, load_model and load_weights end with "'str' object has no attribute 'decode'".
    """
    original = saving.H5Dict.__getitem__

    @functools.wraps(original)
    def __getitem__(self, attr):
        value = original(self, attr)
        return value if isinstance(self.data, dict) else _as_bytes(value)

    def given_bytes(load):
        @functools.wraps(load)
        def wrapper(f, *args, **kwargs):
            return load(_BytesGroup(f), *args, **kwargs)
        return wrapper

    saving.H5Dict.__getitem__ = __getitem__
    for name in ('load_attributes_from_hdf5_group', 'load_weights_from_hdf5_group',
                 'load_weights_from_hdf5_group_by_name'):
        setattr(saving, name, given_bytes(getattr(saving, name)))


def _as_bytes(value):
    """Text as h5py 2 gave it; anything else as it is."""
    if isinstance(value, str):
        return value.encode('utf-8')
    if getattr(getattr(value, 'dtype', None), 'kind', None) == 'O':
        return [_as_bytes(item) for item in value]
    return value


class _BytesGroup:
    """An h5py group whose attributes, and those of its members, are read as bytes."""

    def __init__(self, group):
        self._group = group
        self.attrs = {name: _as_bytes(value) for name, value in group.attrs.items()}

    def __getitem__(self, name):
        member = self._group[name]
        return _BytesGroup(member) if hasattr(member, 'keys') else member

    def __contains__(self, name):
        return name in self._group
