"""Names that a report leaves out: users, hosts, networks, and all folders but the system's."""
from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from typing import Iterator

QUOTED = re.compile(r'(?<=")/[^"\n]+(?=")')  # as in a traceback: it may have spaces
PATH = re.compile(r'(?<![\w./])/[\w.+@~-]+(?:/[\w.+@~-]+)+/?')
SYSTEM = tuple('/%s/' % name for name in ('usr', 'lib', 'lib64', 'proc', 'sys', 'dev', 'etc', 'bin', 'sbin', 'run'))
PACKAGES = re.compile('/(?:site|dist)-packages/|/theano_mgpu/')  # the rest of such a path says which line has failed
NUMBERS = {r'\b(?:\d{1,3}\.){3}\d{1,3}\b': 'ADDRESS', r'\b(?:[\da-f]{2}:){5}[\da-f]{2}\b': 'ADDRESS',
           r'\b(GPU|MIG)-[\da-f]{8}-[\da-f-]+': r'\1-UUID'}
GENERAL = 'root', 'localhost', 'user'


def without_names(text: str) -> str:
    """Return a text without names.

    Examples
    --------
    >>> without_names('File "/home/ann/my work/train.py", line 3, /usr/lib/libcuda.so.1, eth0 10.1.2.3')
    'File ".../train.py", line 3, /usr/lib/libcuda.so.1, eth0 ADDRESS'
    """
    for pattern in QUOTED, PATH:
        text = pattern.sub(_short, text)
    for name, general in _names():
        if len(name) > 1 and name not in GENERAL:
            text = re.sub(r'(?<![\w/-])%s(?![\w-]|\.py\b)' % re.escape(name), general, text)
    for numbers, general in NUMBERS.items():
        text = re.sub(numbers, general, text, flags=re.IGNORECASE)
    return text


def _short(match):
    path, packages = match.group(), PACKAGES.search(match.group())
    if path.startswith(SYSTEM):
        return path
    return '...' + path[packages.start():] if packages else '.../' + os.path.basename(path.rstrip('/'))


def _names() -> Iterator[tuple[str, str]]:
    for node in platform.node(), platform.node().partition('.')[0]:
        yield node, 'HOST'
    for variable in 'USER', 'LOGNAME', 'SUDO_USER':
        yield os.environ.get(variable, ''), 'USER'
    yield os.path.basename(os.path.expanduser('~')), 'USER'
    with contextlib.suppress(KeyError, OSError):  # the user has no name, as in docker run --user
        yield getpass.getuser(), 'USER'
