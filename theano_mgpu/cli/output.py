"""Output of the commands: help, notes, JSON, and silence while a device opens."""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any, Iterator

from ..errors import PREFIX


def add_command(sub: Any, command: Any) -> None:
    """Add a command to argparse's sub-parsers: a module with `add_options`, `run` and, for its arguments, `check`.

    The help is its docstring: "`theano-mgpu NAME`: summary.", and the paragraphs after it, which follow the options.
    """
    title, _, rest = (command.__doc__ or '').partition('\n\n')  # python -OO leaves it out
    summary = title.partition('`: ')[2]
    parser = sub.add_parser(command.__name__.rpartition('.')[2], help=summary.rstrip('.'), epilog=rest,
                            description=summary[:1].upper() + summary[1:],
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=command.run, check=getattr(command, 'check', lambda args: None), parser=parser)
    command.add_options(parser)


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
    """Do as `tell`, with a word that says it is no error; print nothing for an empty text."""
    if text:
        tell('note: ' + text)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
