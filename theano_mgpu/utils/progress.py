"""Progress of long work: bars and notes."""
from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from typing import Any, Callable, Iterator

from ..errors import PREFIX, MgpuError
from .attributes import temporarily

PATIENCE = 5.0  # seconds


def _print(text):
    sys.stderr.write('%snote: %s\n' % (PREFIX, text))


def _yes():
    return True


# `rank_process`, which knows of other processes, replaces these: one process prints for all.
note: Callable[[str], None] = _print     # prints a line for the user to stderr
is_first: Callable[..., bool] = _yes

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


@contextlib.contextmanager
def compiling(title: str) -> Iterator[None]:
    """Show the title on bars while this thread compiles in the ``with`` block, and after a while in a note."""
    note = '%s takes a while; the compiled code is kept for the next start' % title
    with temporarily(_compiling, 'title', title), note_if_long(lambda: note):
        yield


def modules_bar(total: int) -> Any:
    """Return a bar for modules of C code, which disappears at its end.

    It is silent without tqdm, and if this thread compiles for Theano itself.
    """
    title = getattr(_compiling, 'title', None)
    with contextlib.suppress(ImportError):
        if title and is_shown():
            return _tqdm()(total=total, unit=' modules', desc=title, leave=False)
    return Silent()


def _note_beside_bars(text):
    """Print a note, not into the line of a bar."""
    tqdm = getattr(sys.modules.get('tqdm'), 'tqdm', None)
    with tqdm.external_write_mode(sys.stderr) if tqdm else contextlib.nullcontext():
        note(text)


def is_shown() -> bool:
    """Return whether bars are shown: on rank 0, in a terminal or a notebook."""
    # A script may have closed stderr, or put an object of its own there.
    return is_first() and (_in_notebook() or not getattr(sys.stderr, 'closed', True) and sys.stderr.isatty())


def bar(total: int | None, shown: bool, initial: int = 0) -> Any:
    """Return a tqdm bar of samples with their rate; a context manager with ``update(n)``.

    `shown` tells whether the user has asked for a bar: even so, it is shown only where `is_shown` says so, and without
    tqdm it is an MgpuError. `initial` samples are done already.
    """
    if not shown:
        return Silent()
    try:
        tqdm = _tqdm()
    except ImportError as error:
        raise MgpuError('a progress bar needs tqdm: pip install tqdm; or turn it off (verbose=0, --quiet)') from error
    if not is_shown():
        return Silent()
    return tqdm(total=total, initial=initial, unit=' samples', unit_scale=True)


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

    refresh = close = __enter__
