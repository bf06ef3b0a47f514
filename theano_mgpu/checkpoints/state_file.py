"""The file of a training state: arrays as .npz, without pickle, and a checksum over the whole file.

The checksum is the archive's comment, at the end of the file. `numpy.load` reads the file, too.
"""
import collections
import contextlib
import os
import re
import stat
import zipfile
import zlib

import numpy as np

KIND = 'theano_mgpu training state'
FORMAT = KIND + ' 2'
WITHOUT_CHECKSUM = KIND + ' 1'  # what earlier versions wrote
CHECKSUM = b'theano_mgpu checksum %08x'
CHUNK = 1 << 22  # bytes that are read at a time


class Damaged(ValueError):
    """A file is not as it was written, or is none of a training state; the text says how."""


@contextlib.contextmanager
def parsing(what):
    """Make any error of the ``with`` block a Damaged: parsers raise errors of many classes for damaged content."""
    try:
        yield
    except Damaged:
        raise
    except Exception as error:
        raise Damaged('%s cannot be read: %s: %s' % (what, type(error).__name__, error)) from error


def write(file, arrays):
    """Write arrays to an empty file that is open for writing and reading.

    Parameters
    ----------
    file : binary file
    arrays : dict of str to ndarray
        Without objects; 'names' among them, see `check_parts`.
    """
    # The format comes first, so that the beginning tells the kind of file.
    with zipfile.ZipFile(file, 'w') as parts:
        for name, array in dict({'format': np.array(FORMAT)}, **arrays).items():
            with parts.open(name + '.npy', 'w', force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)
        parts.comment = CHECKSUM % 0
    length = file.seek(0, os.SEEK_END) - len(CHECKSUM % 0)
    checksum = _checksum(file, length)
    file.seek(length)
    file.write(CHECKSUM % checksum)


def read(path):
    """Read the arrays of a file that `write` wrote, or an earlier version.

    Parameters
    ----------
    path : str

    Returns
    -------
    dict of str to ndarray

    Raises
    ------
    Damaged
    OSError
        If there is no such file, or it may not be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its other end
        raise Damaged('it is a folder, a device or a pipe')
    with open(path, 'rb') as file:
        checked = False
        try:
            checked = _has_checksum(file)
            arrays = _read_parts(file)
        except Exception as error:  # zipfile and NumPy raise errors of many classes for damaged files
            if isinstance(error, Damaged) or checked and isinstance(error, MemoryError):
                raise
            raise Damaged('%s: %s' % (type(error).__name__, error)) from error
    check_parts(arrays, checked)
    return arrays


def has_checksum(arrays):
    """Return whether the file of these arrays, which `read` has returned, was compared with its checksum."""
    return str(arrays['format']) == FORMAT


def is_own(path):
    """Return whether a file, not a link, begins as a training state does, damaged or not; or is empty."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    with open(path, 'rb') as file:
        beginning = file.read(1 << 20)  # earlier versions began with what a caller had added
    return not beginning or np.array(KIND).tobytes() in beginning


def check_parts(arrays, checked):
    """Raise a Damaged unless all parts of a training state are there, and no others.

    Parameters
    ----------
    arrays : dict of str to ndarray
    checked : bool
        Whether the file has a checksum, which is right.
    """
    found, names = arrays.get('format'), arrays.get('names')
    if found is None or not str(found).startswith(KIND):
        raise Damaged('it has no part "format" that says %r' % KIND)
    if str(found) != (FORMAT if checked else WITHOUT_CHECKSUM):
        raise Damaged('it has no checksum' if str(found) == FORMAT else
                      'it has the format %r, which this version does not know' % str(found))
    if names is None or names.ndim != 1 or names.size and names.dtype.kind != 'U':
        raise Damaged('it has no part "names"')
    expected = {'format', 'names'}.union('value/%d' % i for i in range(len(names)))
    replicas = collections.Counter(key.split('/')[1] for key in arrays if re.fullmatch('stream/[0-9]+/[0-9]+', key))
    expected.update('stream/%d/%d' % (i, replica) for i in range(len(names)) for replica in range(replicas[str(i)]))
    parts = {key for key in arrays if not key.startswith('extra/')}
    if parts != expected:
        raise Damaged('missing parts: %s; unknown ones: %s'
                      % tuple(', '.join(sorted(some)) or 'none' for some in (expected - parts, parts - expected)))


def _read_parts(file):
    """Return the arrays of an open archive."""
    arrays = {}
    with zipfile.ZipFile(file) as parts:
        for name in parts.namelist():
            with parts.open(name) as part:
                array = np.lib.format.read_array(part, allow_pickle=False)
                if part.read(1):  # zipfile compares the checksum of a part at its end
                    raise Damaged('its part %s is longer than its array' % name)
            if not name.endswith('.npy') or arrays.setdefault(name[:-len('.npy')], array) is not array:
                raise Damaged('its part %s is unknown, or there twice' % name)
    return arrays


def _has_checksum(file):
    """Return whether an open file ends with a checksum; a Damaged if it is wrong."""
    length = file.seek(0, os.SEEK_END) - len(CHECKSUM % 0)
    file.seek(max(0, length))
    end = file.read()
    if not end.startswith(CHECKSUM[:-4]):
        return False
    if end != CHECKSUM % _checksum(file, length):
        raise Damaged('its checksum is wrong')
    return True


def _checksum(file, length):
    """Return the CRC-32 of the first bytes of an open file."""
    file.seek(0)
    checksum = 0
    while length:
        data = file.read(min(length, CHUNK))
        if not data:
            break
        checksum = zlib.crc32(data, checksum)
        length -= len(data)
    return checksum
