"""Progress of long work: bars and notes."""
import contextlib
import threading

from ..errors import MgpuError
from ..jobs import rank_process

PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def note_if_long(text):
    """Print a note, on rank 0 only, if the ``with`` block takes longer than `PATIENCE`.

    Parameters
    ----------
    text : callable
        ``text()`` returns the note; it is called when the note is printed.
    """
    timer = threading.Timer(PATIENCE, lambda: rank_process.note(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bar(total, shown, initial=0):
    """A tqdm bar of samples, with their rate; a context manager with ``update(n)``.

    Parameters
    ----------
    total : int or None
        None if unknown.
    shown : bool
    initial : int
        Samples that are done already.

    Raises
    ------
    MgpuError
        If `shown` and tqdm is not installed.
    """
    if not shown:
        return Silent()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MgpuError('a progress bar needs tqdm: pip install tqdm; or turn it off (verbose=0, --quiet)') from error
    return tqdm(total=total, initial=initial, unit=' samples', unit_scale=True)


class Silent:
    """A bar that shows nothing."""

    total = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n):
        """Do nothing."""

    refresh = __enter__
