"""The file of a training state: arrays as .npz, without pickle, and a checksum over the whole file.

The checksum is the archive's comment, at the end of the file. `numpy.load` reads the file, too.
"""
from __future__ import annotations

import contextlib
import os
import stat
import zipfile
import zlib
from typing import Any, BinaryIO, Iterator, Mapping

import numpy as np

KIND = 'theano_mgpu training state'
FORMAT = KIND + ' 2'
CHECKSUM = b'theano_mgpu checksum %08x'
BEGINNING = 1 << 10  # bytes of a file, the format among them
CHUNK = 1 << 22  # bytes that are read at a time


class Damaged(ValueError):
    """An error about a file that is not as it was written, or is none of a training state; the text says how."""


@contextlib.contextmanager
def parsing(what: str) -> Iterator[None]:
    """Make any error of the ``with`` block a Damaged: parsers raise errors of many classes for damaged content."""
    try:
        yield
    except Damaged:
        raise
    except Exception as error:
        raise Damaged('%s cannot be read: %s: %s' % (what, type(error).__name__, error)) from error


def write(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays without objects to an empty file that is open for writing and reading."""
    # The format comes first, so that the beginning tells the kind of file.
    with zipfile.ZipFile(file, 'w') as parts:
        for name, array in {'format': np.array(FORMAT), **arrays}.items():
            with parts.open(name + '.npy', 'w', force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)
        parts.comment = CHECKSUM % 0
    length = file.seek(0, os.SEEK_END) - len(CHECKSUM % 0)
    checksum = _checksum(file, length)
    file.seek(length)
    file.write(CHECKSUM % checksum)


def read(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `write` wrote, by name; raise a Damaged if it is not as it was written."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its other end
        raise Damaged('it is a folder, a device or a pipe')
    with open(path, 'rb') as file:
        length = file.seek(0, os.SEEK_END) - len(CHECKSUM % 0)
        file.seek(max(0, length))
        end = file.read()
        if not end.startswith(CHECKSUM[:-4]):
            raise Damaged('it has no checksum')
        if end != CHECKSUM % _checksum(file, length):
            raise Damaged('its checksum is wrong')
        file.seek(0)
        arrays = dict(np.load(file))
    if str(arrays['format']) != FORMAT:
        raise Damaged('it has the format %r, which this version does not know' % str(arrays['format']))
    return arrays


def is_own(path: str) -> bool:
    """Return whether a file, not a link, begins as a training state does, damaged or not; or is empty."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    with open(path, 'rb') as file:
        beginning = file.read(BEGINNING)
    return not beginning or np.array(KIND).tobytes() in beginning


def _checksum(file, length):
    """Return the CRC-32 of the first bytes of an open file."""
    file.seek(0)
    checksum = 0
    for start in range(0, length, CHUNK):
        checksum = zlib.crc32(file.read(min(length - start, CHUNK)), checksum)
    return checksum


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names begin with a prefix, without the prefix."""
    return {name[len(prefix):]: value for name, value in values.items() if name.startswith(prefix)}
