"""Progress of long work: bars and notes."""
import contextlib
import sys
import threading

from ..errors import MgpuError
from ..jobs import mpi_environment, rank_process

PATIENCE = 5.0  # seconds

_compiling = threading.local()  # title: what this thread compiles


@contextlib.contextmanager
def note_if_long(text):
    """Print a note, on rank 0 only, if the ``with`` block takes longer than `PATIENCE`.

    Parameters
    ----------
    text : callable
        ``text()`` returns the note; it is called when the note is printed.
    """
    timer = threading.Timer(PATIENCE, lambda: _note(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def compiling(title):
    """In the ``with`` block this thread compiles what the title names: bars show it, and after a while a note does."""
    before, _compiling.title = getattr(_compiling, 'title', None), title
    try:
        with note_if_long(lambda: '%s takes a while; what is compiled is kept for the next time' % title):
            yield
    finally:
        _compiling.title = before


def modules_bar(total):
    """A bar for modules of C code; silent if this thread compiles for Theano itself."""
    title = getattr(_compiling, 'title', None)
    return passing_bar(total, 'modules', title) if title else Silent()


def _note(text):
    """Print a note, not into the line of a bar."""
    tqdm = getattr(sys.modules.get('tqdm'), 'tqdm', None)
    with tqdm.external_write_mode(sys.stderr) if tqdm else contextlib.nullcontext():
        rank_process.note(text)


def is_shown():
    """Whether bars are shown: on rank 0, in a terminal or a notebook."""
    # A script may have closed stderr, or put an object of its own there.
    return mpi_environment.rank() == 0 and (_in_notebook() or
                                            not getattr(sys.stderr, 'closed', True) and sys.stderr.isatty())


def bar(total, shown, initial=0, unit='samples'):
    """A tqdm bar with its rate; a context manager with ``update(n)``.

    Parameters
    ----------
    total : int or None
        None if unknown.
    shown : bool or str
        True, or the title of the bar, is what a user has asked for: even so, it is shown only where `is_shown` says so.
    initial : int
        How much is done already.
    unit : str

    Raises
    ------
    MgpuError
        If `shown` and tqdm is not installed.
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


def passing_bar(total, unit, title):
    """A bar that nobody has asked for: it disappears at its end, and is not shown without tqdm."""
    try:
        tqdm = _tqdm() if is_shown() else None
    except ImportError:
        tqdm = None
    return Silent() if tqdm is None else tqdm(total=total, unit=' ' + unit, desc=title, leave=False)


def _tqdm():
    if _in_notebook():
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm  # without asyncio, which tqdm.auto imports
    return tqdm


def _in_notebook():
    ipython = sys.modules.get('IPython')
    return ipython is not None and hasattr(ipython.get_ipython(), 'kernel')


class Silent:
    """A bar that shows nothing."""

    total = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n):
        """Do nothing."""

    def set_postfix_str(self, text):
        """Do nothing."""

    refresh = close = __enter__
