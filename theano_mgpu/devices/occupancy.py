"""The processes of this user that have opened contexts, so that a list of devices can name them.

Each process writes one small file, and removes it when it ends. A file whose process has ended otherwise is removed by
the next reader.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import stat
import tempfile
from typing import Any, Iterable, List, NamedTuple, Tuple

from ..utils import mpi_environment
from ..utils.files import whole_text


class Occupant(NamedTuple):
    """A process and its contexts: pairs of a context's name and its device, or its card's PCI bus id."""

    pid: int
    rank: int
    size: int
    contexts: List[Tuple[str, str]]


def folder() -> str:
    """Return the folder of the files of this user."""
    return os.path.join(tempfile.gettempdir(), 'theano_mgpu-%d' % os.getuid())


def announce(contexts: Iterable[Tuple[str, str]]) -> None:
    """Write which contexts this process has opened; do nothing where the folder cannot be written."""
    path = os.path.join(folder(), '%d.json' % os.getpid())
    with contextlib.suppress(OSError):
        os.makedirs(folder(), mode=0o700, exist_ok=True)
        if not _is_private(folder()):
            return
        with whole_text(path) as file:
            json.dump([_started(os.getpid()), mpi_environment.rank(), mpi_environment.size(), list(contexts)], file)
        atexit.register(_remove, path, os.getpid())


def occupants() -> list[Occupant]:
    """Return the processes of this user that have contexts open now, by their numbers."""
    found: list[Occupant] = []
    with contextlib.suppress(FileNotFoundError):
        if not _is_private(folder()):
            return found
        for name in os.listdir(folder()):
            pid, _, ending = name.partition('.')
            if not pid.isdecimal() or ending != 'json':
                continue
            with contextlib.suppress(OSError, ValueError):  # it may end just now
                with open(os.path.join(folder(), name)) as file:
                    started, rank, size, contexts = json.load(file)
                if started == _started(int(pid)):
                    found.append(Occupant(int(pid), rank, size, [(name, device) for name, device in contexts]))
                else:
                    os.remove(os.path.join(folder(), name))
    return sorted(found)


def _is_private(path):
    """Return whether a folder belongs to this user, and nobody else may write into it."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _started(pid: int) -> Any:
    """Return when a process has started, in the kernel's units; None if there is no such process."""
    try:
        with open('/proc/%d/stat' % pid) as file:
            return int(file.read().rpartition(')')[2].split()[19])
    except (OSError, IndexError):
        return None


def _remove(path, pid):
    if os.getpid() == pid:  # a fork has another one
        with contextlib.suppress(OSError):
            os.remove(path)
