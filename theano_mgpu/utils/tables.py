"""Text: tables, and numbers with their nouns or units."""
from __future__ import annotations

import html
from typing import Collection, Sequence

UNITS = ('KiB', 'MiB', 'GiB', 'TiB')


class Printed:
    """An object that is made to be printed; a notebook shows the same text.

    Examples
    --------
    >>> class Report(Printed):
    ...     def __str__(self):
    ...         return 'x < 1'
    >>> Report()._repr_html_()
    '<pre>x &lt; 1</pre>'
    """

    def _repr_html_(self):
        return '<pre>%s</pre>' % html.escape(str(self), quote=False)


def counted(n: int, noun: str) -> str:
    """Return a number and its noun.

    Examples
    --------
    >>> counted(1, 'rank'), counted(2048, 'rank')
    ('1 rank', '2,048 ranks')
    """
    return '%s %s%s' % (format(n, ','), noun, 's' if n != 1 else '')


def bytes_text(count: int | None, unknown: str = '-') -> str:
    """Return a number of bytes in binary units; another text for None.

    Examples
    --------
    >>> bytes_text(2147483648), bytes_text(1536), bytes_text(12), bytes_text(None)
    ('2.0 GiB', '1.5 KiB', '12 B', '-')
    """
    if count is None:
        return unknown
    power = min(len(UNITS), (int(count).bit_length() - 1) // 10)
    return '%.1f %s' % (count / 1024 ** power, UNITS[power - 1]) if power > 0 else '%d B' % count


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows of cells as aligned lines, with two spaces between columns and none at the end of a line.

    The last cell of a shorter row (a long message) does not widen its column. `right` has the columns that are aligned
    to the right.

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
