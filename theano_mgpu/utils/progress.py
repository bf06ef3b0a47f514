"""Progress of long work: bars and notes."""
from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from typing import Any, Callable, Iterator

from ..errors import MgpuError
from .attributes import temporarily

PATIENCE = 5.0  # seconds


# `rank_process`, which the package imports first, and which knows of other processes, sets these: one prints for all.
note: Any = None      # prints a line for the user to stderr
is_first: Any = None  # returns whether this process prints

_compiling = threading.local()  # title: names the function that this thread compiles


@contextlib.contextmanager
def note_if_long(text: Callable[[], str]) -> Iterator[None]:
    """Print a note, on rank 0 only, if the ``with`` block takes longer than `PATIENCE`; ``text()`` returns it then."""
    timer = threading.Timer(PATIENCE, lambda: _note_beside_bars(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a process with a thread more than the script's own is not forked


@contextlib.contextmanager
def compiling(title: str) -> Iterator[None]:
    """Show the title on bars while this thread compiles in the ``with`` block, and after a while in a note."""
    note = '%s takes a while; the compiled code is kept for the next start' % title
    with temporarily(_compiling, 'title', title), note_if_long(lambda: note):
        yield


def modules_bar(total: int) -> Any:
    """Return a bar for modules of C code; silent if this thread compiles for Theano itself."""
    title = getattr(_compiling, 'title', None)
    return passing_bar(total, 'modules', title) if title else Silent()


def _note_beside_bars(text):
    """Print a note, not into the line of a bar."""
    tqdm = getattr(sys.modules.get('tqdm'), 'tqdm', None)
    with tqdm.external_write_mode(sys.stderr) if tqdm else contextlib.nullcontext():
        note(text)


def is_shown() -> bool:
    """Return whether bars are shown: on rank 0, in a terminal or a notebook."""
    # A script may have closed stderr, or put an object of its own there.
    return is_first() and (_in_notebook() or not getattr(sys.stderr, 'closed', True) and sys.stderr.isatty())


def bar(total: int | None, shown: bool | str, initial: int = 0, unit: str = 'samples') -> Any:
    """Return a tqdm bar with its rate; a context manager with ``update(n)``.

    `shown` tells whether the user has asked for a bar, or its title: even so, it is shown only where `is_shown` says
    so, and without tqdm it is an MgpuError. `initial` units are done already.
    """
    if not shown:
        return Silent()
    try:
        tqdm = _tqdm()
    except ImportError as error:
        raise MgpuError('a progress bar needs tqdm: pip install tqdm; or turn it off (verbose=0, progress=False, '
                        '--quiet)') from error
    if not is_shown():
        return Silent()
    title = shown if isinstance(shown, str) else None
    return tqdm(total=total, initial=initial, unit=' ' + unit, unit_scale=unit == 'samples', desc=title)


def passing_bar(total: int, unit: str, title: str) -> Any:
    """Return a bar that nobody has asked for: it disappears at its end, and is not shown without tqdm."""
    try:
        tqdm = _tqdm() if is_shown() else None
    except ImportError:
        tqdm = None
    return Silent() if tqdm is None else tqdm(total=total, unit=' ' + unit, desc=title, leave=False)


def _tqdm():
    return importlib.import_module('tqdm.auto' if _in_notebook() else 'tqdm').tqdm  # tqdm.auto imports asyncio


def _in_notebook():
    ipython = sys.modules.get('IPython')
    return ipython is not None and hasattr(ipython.get_ipython(), 'kernel')


class Silent:
    """A bar that shows nothing."""

    total: Any = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n: int) -> None:
        """Do nothing."""

    def set_postfix_str(self, text: str) -> None:
        """Do nothing."""

    refresh = close = __enter__
