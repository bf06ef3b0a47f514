"""Arguments of several commands: numbers, and ``--contexts MAP`` and ``--gpus N|LIST``, which mean the same in each."""
from __future__ import annotations

import argparse

from ..devices.context_map import Context, describe, parse_context_map
from ..devices.contexts import OPTION, choose_contexts
from ..errors import MgpuError
from ..parsing import MOST, MOST_DEVICES, shown, whole_number
from ..utils.flag_text import environment_flags, set_environment_flags
from .output import note


def positive(text: str, most: int = MOST) -> int:
    """Return a whole number of at least 1 that is an argument.

    Examples
    --------
    >>> positive('4')
    4
    """
    number = whole_number(text, 1, most)
    if number is None:
        raise argparse.ArgumentTypeError('%s is not a whole number of at least 1, and at most %d' % (shown(text), most))
    return number


def devices(text: str) -> int:
    """Return a number of contexts or processes that is an argument.

    Examples
    --------
    >>> devices('4')
    4
    """
    return positive(text, MOST_DEVICES)


def add_contexts(parser: argparse.ArgumentParser, *short: str) -> None:
    """Add ``--contexts`` and ``--gpus``, which may have a short name, to the parser of a command.

    Either sets `contexts`: a map as text, a number, a list of numbers and names, or None.
    """
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--contexts', metavar='MAP', type=context_map,
                       help="contexts and their devices, e.g. 'dev0->cuda0;dev1->cuda1', quoted (default: the contexts "
                       'of THEANO_FLAGS or .theanorc, or else every GPU but those that a note names, or else every '
                       'core)')
    which.add_argument(*short, '--gpus', metavar='N|LIST', type=gpus, dest='contexts',
                       help='how many of these default contexts, or their names or numbers, e.g. 2, or 0,2, or '
                       'dev0,dev2; without a GPU and a map, N contexts on the CPU, at most one a core')


def context_map(text: str) -> int | str:
    """Return a context map that is an argument, or the number that `bench` and `config` once took."""
    if text.isdecimal():
        note('--contexts %s: a number of contexts is --gpus %s now; 0.4.0 removes it' % (text, text))
        return devices(text)
    try:
        return describe(parse_context_map(text))
    except MgpuError as error:  # argparse needs an error of its own type
        raise argparse.ArgumentTypeError(error) from error


def gpus(text: str) -> int | list[int | str]:
    """Return the argument of --gpus: a number, or a list of numbers and names.

    Examples
    --------
    >>> gpus('2'), gpus('0,3'), gpus('dev1,dev0'), gpus('dev1')
    (2, [0, 3], ['dev1', 'dev0'], ['dev1'])
    """
    if text == '0':
        raise argparse.ArgumentTypeError("'0' is not a whole number of at least 1; for the first alone: --gpus dev0")
    if text.isdecimal():
        return devices(text)
    return [int(part) if part.isdecimal() else part for part in text.split(',')]


def selected(args: argparse.Namespace) -> list[Context] | None:
    """Return the contexts that the options of `add_contexts` select, or None without one; open none.

    Raise a ContextError for contexts that are not there.
    """
    return choose_contexts(args.contexts, OPTION) if args.contexts else None


def use_contexts(args: argparse.Namespace) -> None:
    """Have this process, and those that it starts, use the contexts that the options select, if there are any."""
    contexts = selected(args)
    if contexts:
        set_environment_flags({**environment_flags(), 'contexts': describe(contexts)})
