"""Output of the commands: help, notes, JSON, readable units, and silence while a device opens."""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any, Iterator

from ..errors import PREFIX

UNITS = ('KiB', 'MiB', 'GiB', 'TiB')


def help_of(doc: str | None, more: str = '') -> dict[str, Any]:
    """Return the settings of an argparse parser whose help ends with a module's docstring, after its first paragraph.

    Parameters
    ----------
    doc : str or None
    more : str, optional
        The last lines of the help.
    """
    return dict(epilog=(doc or '').partition('\n\n')[2] + more, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Discard all that is printed to stdout and stderr during the ``with`` block.

    Theano 1.0.5 prints "Mapped name dev0 to device ..." and lines about cuDNN whenever it opens a device; its flag
    ``print_active_device`` cannot be changed after the import.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def tell(text: str) -> None:
    """Print a line for the user to stderr, unless that is closed."""
    if sys.stderr is not None:  # else Python would print to stdout
        print(PREFIX + text, file=sys.stderr)


def note(text: str) -> None:
    """Do as `tell`, with a word that says it is no error."""
    tell('note: ' + text)


def human_bytes(count: int | None) -> str:
    """Return a number of bytes in binary units; ``-`` for None.

    Examples
    --------
    >>> human_bytes(2147483648), human_bytes(1536), human_bytes(12), human_bytes(None)
    ('2.0 GiB', '1.5 KiB', '12 B', '-')
    """
    if count is None:
        return '-'
    power = min(len(UNITS), (int(count).bit_length() - 1) // 10)
    return '%.1f %s' % (count / 1024 ** power, UNITS[power - 1]) if power > 0 else '%d B' % count


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
