"""Numbers and names in what users and schedulers give as text: options, flags, variables and files."""
from __future__ import annotations

import difflib
import re
from typing import Collection

MOST = 10 ** 9          # of all things that are counted
MOST_DEVICES = 4096     # of contexts, and of processes
MOST_WEIGHT = 10 ** 6   # in a ratio
LONGEST = 60            # characters of a text in an error
HOST = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.@%-]{0,254}')  # a name that begins with - would be an option of ssh


def whole_number(text: str, least: int = 0, most: int = MOST) -> int | None:
    """Return the whole number that a text has, or None if it has none, or one out of range.

    Examples
    --------
    >>> whole_number('12'), whole_number('0', 1), whole_number('1e3'), whole_number('9' * 5000)
    (12, None, None, None)
    """
    if not re.fullmatch('0*[0-9]{1,18}', text):
        return None
    value = int(text[-18:])
    return value if least <= value <= most else None


def ratio(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a ratio, or None if a text is none.

    Examples
    --------
    >>> ratio('3:1'), ratio('7:2:1'), ratio('3'), ratio('3:0')
    ((3, 1), (7, 2, 1), None, None)
    """
    numbers = [whole_number(part, 1, MOST_WEIGHT) for part in text.split(':')]
    return None if None in numbers or len(numbers) < 2 else tuple(filter(None, numbers))


def shown(text: str, longest: int = LONGEST) -> str:
    """Return a text for an error: shortened, on one line, in quotes.

    Examples
    --------
    >>> print(shown('a->b'), shown('9' * 5000)[-7:])
    'a->b' 999...'
    """
    return repr(text if len(text) <= longest else text[:longest] + '...')


def bare(text: str, longest: int = LONGEST) -> str:
    """Return a text for an error as `shown` does, without the quotes."""
    return shown(text, longest)[1:-1]


def nearest(name: str, names: Collection[str]) -> str:
    """Return the nearest of some names for an error about one that does not exist, or all of them.

    Examples
    --------
    >>> nearest('runn', ['run', 'predict']), nearest('x', ['run', 'predict'])
    ('the nearest is run', 'there are: run, predict')
    """
    found = difflib.get_close_matches(name, names, n=1)
    return 'the nearest is ' + found[0] if found else 'there are: ' + ', '.join(names)


def is_host(name: str) -> bool:
    """Return whether a text can be the name of a host.

    Examples
    --------
    >>> is_host('node-1.cluster'), is_host('-oProxyCommand=x'), is_host('a b')
    (True, False, False)
    """
    return HOST.fullmatch(name) is not None
