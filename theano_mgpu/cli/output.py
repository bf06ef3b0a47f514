"""What the commands share: tables, human units, and silence while a device opens."""
import contextlib
import io
import json
import sys

UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')


@contextlib.contextmanager
def quietly():
    """Keep what is printed inside off the terminal, and out of JSON.

    Theano 1.0.5 prints "Mapped name dev0 to device ..." and news of cuDNN whenever it opens a
    device; its flag for that, ``print_active_device``, can't be changed after the import.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def note(text):
    """Print a line for the user to stderr."""
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


def table(rows, right=()):
    """Rows of cells as aligned lines, two blanks between columns, none at the end of a line.

    A cell that ends its row before the last column (a long message) widens no column.

    Parameters
    ----------
    rows : list of list of str
    right : set of int
        Columns that are aligned to the right.

    Examples
    --------
    >>> print(table([['CONTEXT', 'FREE'], ['dev0', '2.0 GiB'], ['dev1']], right={1}))
    CONTEXT     FREE
    dev0     2.0 GiB
    dev1
    """
    n_columns = max(len(row) for row in rows)
    widths = [max(len(row[column]) for row in rows if len(row) == n_columns or len(row) > column + 1)
              for column in range(n_columns)]
    return '\n'.join('  '.join(cell.rjust(width) if column in right else cell.ljust(width)
                               for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
                     for row in rows)


def print_json(value):
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
