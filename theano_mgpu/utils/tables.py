"""Text: tables, and numbers with their nouns."""
from __future__ import annotations

import html
from typing import Collection, Sequence


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


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows of cells as aligned lines, with two spaces between columns and none at the end of a line.

    The last cell of a shorter row (a long message) does not widen its column.

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
