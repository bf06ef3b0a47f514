"""The result of `verify`: a table of differences between one device and several contexts."""
from __future__ import annotations

import sys
from typing import Any, NamedTuple, Sequence

import numpy as np

from ...devices.context_map import Context, describe
from ...errors import PREFIX, GraphError
from ...utils.tables import Printed, counted, table

# The largest relative difference that counts as rounding, for each dtype.
TOLERANCE = {'float16': 1e-2, 'float32': 1e-5, 'float64': 1e-10}


class Row(NamedTuple):
    """One line of a `VerificationReport`.

    Attributes
    ----------
    kind : str
        loss, metric, gradient, weight, running statistic or optimizer for a model; output or new value for a function.
    name : str
    size : int
        Count of numbers.
    difference : float
        The largest one, relative to the largest value on one device; for gradients, relative to the largest of all.
    """

    kind: str
    name: str
    size: int
    difference: float


class VerificationReport(Printed):
    """The result of `verify`. Print it: it is a table.

    Attributes
    ----------
    rows : list of Row
    contexts : list of Context
    tolerance : float
    arbitrary : list of str
        Names of values that are not compared, since a change of the inputs in their last digit changes them as much.
    passed : bool
        Whether no difference is above the tolerance.
    """

    def __init__(self, rows: Sequence[Row], contexts: Sequence[Context], tolerance: float,
                 arbitrary: Sequence[str] = ()) -> None:
        self.rows, self.contexts, self.tolerance, self.arbitrary = rows, contexts, tolerance, arbitrary
        self.passed = all(row.difference <= tolerance for row in rows)

    def show(self, name: str, strict: bool = False) -> None:
        """Print it to stderr under a name; with `strict`, raise a GraphError unless it passed."""
        print('%s%s: %s' % (PREFIX, name, self), file=sys.stderr)
        if strict and not self.passed:
            raise GraphError('%s does not give the same answer on several contexts (%s): see the report above'
                             % (name, describe(self.contexts)))

    def __str__(self) -> str:
        rows = [[row.kind, row.name, str(row.size), '%.1e%s' % (
            row.difference, '' if row.difference <= self.tolerance else '  <-- differs')] for row in self.rows]
        kinds = {row.kind for row in self.rows}
        computation = 'prediction' if kinds <= {'output'} else 'evaluation' if kinds <= {'loss', 'metric'} else 'step'
        lines = ['one %s on one device and on %s (%s)'
                 % (computation, counted(len(self.contexts), 'context'), describe(self.contexts)),
                 table([['', '', 'numbers', 'largest relative difference'], *rows], right={2})]
        if self.arbitrary:
            lines.append('not compared, since a change of the inputs in their last digit changes it as much: %s'
                         % ', '.join(self.arbitrary))
        worst = max([row.difference for row in self.rows], default=0)
        verdict = 'same answer' if self.passed else 'NOT the same answer'
        lines.append('%s: the largest difference is %.1e, the tolerance %.1e' % (verdict, worst, self.tolerance))
        return '\n'.join(lines)


def largest(value: Any) -> float:
    """Return the largest absolute value; 0 for no values."""
    return float(np.abs(np.asarray(value, 'float64')).max()) if np.size(value) else 0.0


def relative_difference(value: Any, reference: Any, least: float = 0) -> float:
    """Return the largest difference, relative to the largest value of the reference, or to `least` if that is larger.

    Values that are equal, or both NaN, have no difference.

    Examples
    --------
    >>> relative_difference([1.0, 5.0], [1.0, 4.0])
    0.25
    >>> relative_difference([float('nan'), float('inf')], [float('nan'), float('inf')])
    0.0
    """
    value, reference = np.asarray(value, 'float64'), np.asarray(reference, 'float64')
    if value.shape != reference.shape:
        return float('inf')
    alike = (value == reference) | np.isnan(value) & np.isnan(reference)
    finite = np.where(np.isfinite(reference), reference, 0)
    return largest(np.where(alike, 0, value) - np.where(alike, 0, reference)) / (max(largest(finite), least) or 1)
