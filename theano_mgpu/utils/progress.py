"""Progress of long work: bars and notes."""
from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from typing import Any, Callable, Iterator

from ..errors import MgpuError
from .attributes import temporarily

PATIENCE = 5.0  # seconds


# `rank_process`, which the package imports first, and which knows of other processes, sets these: one prints for all.
note: Any = None      # prints a line for the user to stderr
is_first: Any = None  # returns whether this process prints

_thread = threading.local()  # compilation: what this thread compiles
_told: set[str] = set()      # names of functions whose compilation was noted


@contextlib.contextmanager
def note_if_long(text: Callable[[], str], patience: float | None = None) -> Iterator[None]:
    """Print a note, ``text()``, on rank 0 only, if the ``with`` block takes longer than some seconds, or `PATIENCE`."""
    timer = threading.Timer(PATIENCE if patience is None else patience, lambda: _note_beside_bars(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a process with a thread more than the script's own is not forked


class _Compilation:
    """A function that a thread compiles: its name, a title, and the bar of its modules of C code."""

    def __init__(self, name: str, on: str):
        self.name, self.title, self.bar = name, 'compiling %s%s' % (name, on), Silent()
        self.is_working = False
        self.patience = PATIENCE  # seconds of work that the caches do not save, until the note

    def note(self) -> str:
        """Return the note, which is the only one for this name; '' where all modules are done."""
        if self.bar.n == self.bar.total:
            return ''
        _told.add(self.name)
        share = '%d of %d modules of C code are done, and are kept for the next start' % (self.bar.n, self.bar.total) \
            if self.bar.total else 'its graph is being optimised'
        return '%s takes a while: %s' % (self.title, share)


def compiling(name: str, on: str = '') -> Any:
    """Return a context manager: in it, this thread compiles a function, which bars and the note of `working` name.

    `on` ends the name with its contexts. Within another one, what that one compiles counts.
    """
    now = getattr(_thread, 'compilation', None) or _Compilation(name, on)
    return temporarily(_thread, 'compilation', now)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Count the time of the ``with`` block as work of `compiling` that no cache has saved; much of it is noted once."""
    now = getattr(_thread, 'compilation', None)
    if now is None or now.is_working or now.name in _told:
        yield
        return
    began = time.monotonic()
    try:
        with temporarily(now, 'is_working', True), note_if_long(now.note, max(0, now.patience)):
            yield
    finally:
        now.patience -= time.monotonic() - began


@contextlib.contextmanager
def modules_bar(total: int) -> Iterator[Any]:
    """Yield a bar for modules of C code; silent if this thread compiles for Theano itself."""
    now = getattr(_thread, 'compilation', None) or _Compilation('', '')
    with passing_bar(total, 'modules', now.title) if now.name else Silent() as bar, temporarily(now, 'bar', bar):
        yield bar


def _note_beside_bars(text):
    """Print a note, unless it is empty, not into the line of a bar."""
    tqdm = getattr(sys.modules.get('tqdm'), 'tqdm', None)
    with tqdm.external_write_mode(sys.stderr) if tqdm else contextlib.nullcontext():
        if text:
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
    return Silent(total) if tqdm is None else tqdm(total=total, unit=' ' + unit, desc=title, leave=False)


def _tqdm():
    return importlib.import_module('tqdm.auto' if _in_notebook() else 'tqdm').tqdm  # tqdm.auto imports asyncio


def _in_notebook():
    ipython = sys.modules.get('IPython')
    return ipython is not None and hasattr(ipython.get_ipython(), 'kernel')


class Silent:
    """A bar that shows nothing, and counts."""

    n = 0

    def __init__(self, total: int | None = None):
        self.total: Any = total

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n: int) -> None:
        """Count units that are done."""
        self.n += n

    def set_postfix_str(self, text: str) -> None:
        """Do nothing."""

    refresh = close = __enter__
