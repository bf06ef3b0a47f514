"""Progress bars on long work."""
from .errors import MgpuError


def bar(total, shown, unit=' samples', description=None):
    """A bar of tqdm's, with the rate; a context manager with ``update(n)``.

    Parameters
    ----------
    total : int or None
        None if unknown.
    shown : bool
    unit, description : str, optional

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
        raise MgpuError('a progress bar needs tqdm: pip install tqdm; or ask for none (verbose=0)') from error
    return tqdm(total=total, unit=unit, unit_scale=True, desc=description)


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
