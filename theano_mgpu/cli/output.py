"""Output of the commands: notes, JSON, readable units, and silence while a device opens."""
import contextlib
import io
import json
import sys

UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')


@contextlib.contextmanager
def quietly():
    """A context manager that discards what is printed to stdout and stderr.

    Theano 1.0.5 prints "Mapped name dev0 to device ..." and lines about cuDNN whenever it opens a device; its flag
    ``print_active_device`` cannot be changed after the import.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def note(text):
    """Print a line for the user to stderr, unless that is closed."""
    if sys.stderr is not None:  # else Python would print to stdout
        print('theano-mgpu: note: ' + text, file=sys.stderr)


def human_bytes(count):
    """A number of bytes in binary units; ``-`` for None.

    Examples
    --------
    >>> human_bytes(2147483648), human_bytes(1536), human_bytes(12), human_bytes(None)
    ('2.0 GiB', '1.5 KiB', '12 B', '-')
    """
    if count is None:
        return '-'
    scaled = float(count)
    for unit in UNITS:
        if scaled < 1024 or unit == UNITS[-1]:
            return '%d B' % count if unit == 'B' else '%.1f %s' % (scaled, unit)
        scaled /= 1024


def print_json(value):
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
