"""News of long work: progress bars, and notes."""
import contextlib
import threading

from ..errors import MgpuError
from ..jobs import rank_process

PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def note_if_long(text):
    """Print a note, from the first rank alone, if what is inside takes longer than `PATIENCE`.

    Parameters
    ----------
    text : callable
        ``text()`` is the note, asked for when it is due.
    """
    timer = threading.Timer(PATIENCE, lambda: rank_process.note(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bar(total, shown, initial=0):
    """A bar of tqdm's over samples, with their rate; a context manager with ``update(n)``.

    Parameters
    ----------
    total : int or None
        None if unknown.
    shown : bool
    initial : int
        Samples that were done before.

    Raises
    ------
    MgpuError
        If it is to be shown, and tqdm is not installed.
    """
    if not shown:
        return Silent()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MgpuError('a progress bar needs tqdm: pip install tqdm; or ask for none (verbose=0, --quiet)') from error
    return tqdm(total=total, initial=initial, unit=' samples', unit_scale=True)


class Silent:
    """A bar that shows nothing."""

    total = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n):
        """Nothing to show."""

    refresh = __enter__
