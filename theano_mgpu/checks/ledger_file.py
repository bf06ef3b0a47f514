"""The file of a ledger: a line of JSON for each start of the run, and one for each recorded step of a function.

A start has the keys ``ledger`` (the version of the format), ``every``, ``ranks``, ``devices``, ``versions``, ``blas``
and ``flags``. A step has ``of``, the function, ``step``, ``digest``, and ``values``, a digest for each variable.
"""
from __future__ import annotations

import json
import os
import re
from typing import Any, BinaryIO, Iterable, NamedTuple

from ..errors import MgpuError
from ..utils.files import target_of

VERSION = 1
NOT_COMPARED = 'ledger', 'begun'


class Repeated(NamedTuple):
    """The steps of a function that a restarted run has computed again, and those among them that came out otherwise."""

    of: str
    steps: list[int]
    different: list[int]


class LedgerFile(NamedTuple):
    """The content of a ledger.

    Attributes
    ----------
    path : str
    starts : list of dict
    steps : dict of (str, int) to dict
        The line of each step of a function, in the order of the file; after a restart, the later one.
    repeated : list of Repeated
    is_cut : bool
        Whether the last line is incomplete, as after a kill.
    """

    path: str
    starts: list[dict[str, Any]]
    steps: dict[tuple[str, int], dict[str, Any]]
    repeated: list[Repeated]
    is_cut: bool


class Difference(NamedTuple):
    """A step at which two runs differ: the function, the last step before it that is equal, and the variables."""

    of: str
    step: int
    equal: int | None
    variables: list[str]
    n_variables: int


def read(path: str) -> LedgerFile:
    """Read a ledger; raise an MgpuError if the file cannot be read, is no ledger, or is damaged."""
    try:
        with open(path, 'rb') as file:
            lines, last = _lines(path, file)
    except OSError as error:
        raise MgpuError('%s cannot be read: %s. Name a file that --ledger (mgpu.ledger) has written'
                        % (path, error.strerror)) from error
    starts: list[dict[str, Any]] = []
    steps: dict[tuple[str, int], dict[str, Any]] = {}
    repeated: dict[str, Repeated] = {}
    replaced: dict[tuple[str, int], dict[str, Any]] = {}  # the lines that a restart computes again
    begun: set[str] = set()                               # functions with a line since the last start
    for line in lines:
        if 'ledger' in line:
            starts.append(line)
            begun.clear()
            continue
        of, step = line['of'], line['step']
        if of not in begun:  # a restart begins here: it replaces all later lines
            begun.add(of)
            later = [key for key in steps if key[0] == of and key[1] >= step]
            replaced.update((key, steps.pop(key)) for key in later)
        steps[of, step] = line
        before = replaced.pop((of, step), None)
        if before is not None:
            again = repeated.setdefault(of, Repeated(of, [], []))
            again.steps.append(step)
            again.different.extend([step] * (before['digest'] != line['digest']))
    return LedgerFile(path, starts, steps, list(repeated.values()), bool(last))


def first_difference(a: LedgerFile, b: LedgerFile, common: list[tuple[str, int]]) -> Difference | None:
    """Return the first difference of two ledgers in the steps that both have, in the order of the first; else None."""
    equal: dict[str, int] = {}
    for of, step in common:
        ours, theirs = a.steps[of, step]['values'], b.steps[of, step]['values']
        if unnumbered(ours) == unnumbered(theirs):
            theirs = dict(zip(ours, theirs.values()))
        different = [name for name, *_ in differing(ours, theirs)]
        if different:
            return Difference(of, step, equal.get(of), different, len({**ours, **theirs}))
        equal[of] = step
    return None


def differing(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return the name and both texts of each item in which two dicts differ; a dash for one that is missing."""
    return [(name, ours.get(name, '-'), theirs.get(name, '-')) for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)]


def flat(start: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a start as texts, with a name for each member of a dict.

    >>> flat({'ledger': 1, 'ranks': 2, 'flags': {'floatX': 'float32'}})
    {'ranks': '2', 'flags: floatX': 'float32'}
    """
    found: dict[str, str] = {}
    for key, value in start.items():
        if isinstance(value, dict):
            found.update(('%s: %s' % (key, name), str(each)) for name, each in value.items())
        elif key not in NOT_COMPARED:
            found[key] = '; '.join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def unnumbered(names: Iterable[str]) -> list[str]:
    """Return names of variables without numbers: Keras counts them up from model to model (dense_1, dense_2)."""
    return [re.sub(r'\d+', '#', name) for name in names]


def open_to_continue(path: str) -> BinaryIO:
    """Open a ledger, to which a start of the run is added; an incomplete last line is removed.

    Raise an MgpuError if the file is no ledger, and an OSError if it cannot be written.
    """
    target = target_of(path)
    file = open(target, 'r+b' if os.path.exists(target) else 'x+b')
    try:
        _, last = _lines(path, file)
        file.seek(-len(last), os.SEEK_END)
        file.truncate()
    except BaseException:
        file.close()
        raise
    return file


def _lines(path, file):
    """Return the lines of a ledger, and the bytes of an incomplete last one."""
    *lines, last = file.read().split(b'\n')
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(json.loads(line))
            has_keys = {'ledger', 'every'} <= parsed[-1].keys() or number > 1 and \
                {'of', 'step', 'digest', 'values'} <= parsed[-1].keys()
        except (ValueError, AttributeError):
            has_keys = False
        if not has_keys:
            raise MgpuError('%s is no ledger of theano_mgpu, or is damaged in line %d. Name another file, or remove it'
                            % (path, number))
        if parsed[-1].get('ledger', VERSION) != VERSION:
            raise MgpuError('%s has the format %s, and this version of theano_mgpu knows %s: use the version that '
                            'wrote it' % (path, parsed[-1]['ledger'], VERSION))
    if not lines and last and not last.startswith(b'{"ledger"'[:len(last)]):
        raise MgpuError('%s is no ledger of theano_mgpu. Name another file, or remove it' % path)
    return parsed, last
