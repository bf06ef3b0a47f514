"""Progress bars on long work."""
from .errors import MgpuError


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
