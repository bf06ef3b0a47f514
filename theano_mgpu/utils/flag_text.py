"""Theano's flags as text: THEANO_FLAGS and .theanorc, read without importing Theano, and flags of the package's own."""
from __future__ import annotations

import configparser
import os
import re
import shlex
from typing import Any, Mapping, NamedTuple

from ..errors import MgpuError
from ..parsing import bare, nearest, ratio, shown, whole_number


class Number(NamedTuple):
    """The values of a flag that is a number: the things that it counts, its lowest value, and a word in its place."""

    of: str
    least: int
    word: str = ''

    def __str__(self) -> str:
        return '%sa number of %s, at least %d' % (self.word and '%s, or ' % self.word, self.of, self.least)

    def parse(self, value: Any) -> Any:
        number = whole_number(str(value), self.least)
        return value if number is None and value == (self.word or None) else number


class Ratio(NamedTuple):
    """The values of a flag that is a ratio, such as 3:1, and words in its place."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return '%s, or numbers such as 3:1' % ', '.join(self.words)

    def parse(self, value: Any) -> Any:
        return value if value in self.words or ratio(value) else None


# The package's own flags, to which each room adds: name -> (default, allowed values or a Number, documentation).
OWN_FLAGS: dict[str, tuple[Any, Any, str]] = {}
# Flags that the package had: name -> (the value that counts for all functions now, the reason and what helps).
GONE: dict[str, tuple[str, str]] = {}


def parse_flags(text: str) -> dict[str, str]:
    """Parse a THEANO_FLAGS string, as ``theano.configparser.parse_config_string`` does: the last of a key wins.

    Raise an MgpuError if a quotation is not closed.

    >>> parse_flags('floatX=float32,contexts=dev0->cuda0;dev1->cuda1')
    {'floatX': 'float32', 'contexts': 'dev0->cuda0;dev1->cuda1'}
    """
    splitter = shlex.shlex(text, posix=True)
    splitter.whitespace = ','
    splitter.whitespace_split = True
    try:
        entries = [entry.strip() for entry in splitter]
    except ValueError as error:
        raise MgpuError('THEANO_FLAGS=%s cannot be read: %s. Write name=value,name=value, with quotes in pairs'
                        % (shown(text), str(error)[:1].lower() + str(error)[1:])) from error
    return dict(entry.split('=', 1) for entry in entries if '=' in entry)


def join_flags(flags: Mapping[str, str]) -> str:
    """Join a dict of flags into a THEANO_FLAGS string that `parse_flags` reads back.

    Raise an MgpuError for a flag that no such string has: Theano leaves out a blank at the end of a value, for example.

    >>> join_flags({'floatX': 'float32', 'gcc.cxxflags': '-O2 -g'})
    "floatX=float32,gcc.cxxflags='-O2 -g'"
    """
    text = ','.join('%s=%s' % (_quote(key), _quote(value)) for key, value in flags.items())
    if parse_flags(text) != flags or '\0' in text:
        raise MgpuError('THEANO_FLAGS cannot have all of these flags: %s. No value there ends in a blank or has a byte '
                        '0, and no name begins with a blank or has a "=". Change it' % bare(text, 300))
    return text


def _quote(text):
    """Return a text as Theano's parser reads it back: a quote is written within the other quotes."""
    return "'%s'" % text.replace("'", "'\"'\"'") if re.search(r'[\s,#\\\'"]', text) else text


def theanorc_files() -> list[str]:
    """Return the paths of the .theanorc files that Theano reads, later ones winning."""
    return [os.path.expanduser(path) for path in os.environ.get('THEANORC', '~/.theanorc').split(os.pathsep)]


def read_theanorc(*paths: str) -> dict[str, str]:
    """Read .theanorc files: ``[global] x`` is ``x``, ``[a] b`` is ``a.b``; raise an MgpuError for a malformed one."""
    parser = configparser.RawConfigParser()
    for path in paths or theanorc_files():
        try:
            parser.read(path)
        except (OSError, configparser.Error, ValueError) as error:
            raise MgpuError('%s cannot be read: %s. Fix this file; "theano-mgpu config" prints a valid one'
                            % (path, bare(' '.join(str(error).split()), 300))) from error
    return {(key if section == 'global' else section + '.' + key): value
            for section in parser.sections() for key, value in parser.items(section)}


def environment_flags() -> dict[str, str]:
    """Return the flags of THEANO_FLAGS alone."""
    return parse_flags(os.environ.get('THEANO_FLAGS', ''))


def set_environment_flags(flags: Mapping[str, str]) -> None:
    """Set THEANO_FLAGS to these flags, for this process and those that it starts."""
    os.environ['THEANO_FLAGS'] = join_flags(flags)


def flag(name: str, default: Any = None) -> Any:
    """Return the value of a flag: THEANO_FLAGS first, then .theanorc, else `default`."""
    flags = environment_flags()
    if name in flags:
        return flags[name]
    # configparser lower-cases option names, as Theano's own reading of .theanorc does.
    section, dot, option = name.rpartition('.')
    return read_theanorc().get(section + dot + option.lower(), default)


def values_of(name: str) -> str:
    """Return the values that one of theano_mgpu's own flags can have, as text."""
    allowed = OWN_FLAGS[name][1]
    return str(allowed) if isinstance(allowed, (Number, Ratio, str)) else ', '.join(allowed)


def source_of(name: str) -> str:
    """Return where a flag is set to a value that is not empty: THEANO_FLAGS, or the paths of .theanorc; '' if nowhere.
    """
    place = 'THEANO_FLAGS' if name in environment_flags() else ', '.join(theanorc_files())
    return place if flag(name, '').strip() else ''


def check_own_names() -> None:
    """Raise an MgpuError, with the nearest name, for a flag that begins with ``mgpu.`` and does not exist.

    Theano only warns of a flag that it does not know, and ignores one of .theanorc.
    """
    for flags, where in ((environment_flags(), 'THEANO_FLAGS'), (read_theanorc(), ' or '.join(theanorc_files()))):
        for name, value in flags.items():
            if name.startswith('mgpu.') and name not in {**OWN_FLAGS, **GONE}:
                raise MgpuError('there is no flag %s, which %s sets to %s; %s'
                                % (name, where, value, nearest(name, OWN_FLAGS)))


def own_flag(name: str) -> Any:
    """Return the value of one of theano_mgpu's own flags; raise an MgpuError for a value that it cannot have."""
    default, allowed, _ = OWN_FLAGS[name]
    value = flag(name, default)
    if isinstance(allowed, (Number, Ratio)):
        parsed = allowed.parse(value)
        if parsed is None:
            raise MgpuError('flag %s=%s is not %s. Fix it in THEANO_FLAGS or .theanorc'
                            % (name, bare(str(value)), allowed))
        return parsed
    if isinstance(allowed, tuple) and value not in allowed:
        raise MgpuError('flag %s=%s is not one of %s. Fix it in THEANO_FLAGS or .theanorc'
                        % (name, value, values_of(name)))
    return value
