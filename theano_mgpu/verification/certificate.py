"""The result of `verify`: a table of differences between one device and several contexts."""
import sys
from collections import namedtuple

import numpy as np

from ..devices.context_map import describe
from ..errors import GraphError
from ..utils.tables import Printed

# The largest relative difference that counts as rounding, for each dtype.
TOLERANCE = {'float16': 1e-2, 'float32': 1e-5, 'float64': 1e-10}

Row = namedtuple('Row', 'kind name size difference')
Row.__doc__ = """One line of a `Certificate`, which explains its fields."""


class Certificate(Printed):
    """The result of `verify`. Print it: it is a table.

    Attributes
    ----------
    rows : list of Row
        `kind` (loss, metric, gradient, weight, running statistic or optimizer for a model; output or new value for a
        function), `name`, `size` (how many numbers) and `difference` (the largest one, relative to the largest value
        on one device; for gradients, relative to the largest of all).
    tolerance : float
    arbitrary : list of str
        Names of values that are not compared.
    why : str
        Why they are not.
    passed : bool
        Whether no difference is above the tolerance.
    """

    def __init__(self, rows, contexts, tolerance, arbitrary=(), why='the gradient is zero but for rounding'):
        self.rows, self.tolerance, self.arbitrary, self.why = rows, tolerance, list(arbitrary), why
        self.contexts = contexts
        self.passed = all(row.difference <= tolerance for row in rows)

    def show(self, name, strict=False):
        """Print it to stderr under a name; with `strict`, raise a GraphError unless it passed."""
        print('theano_mgpu: %s: %s' % (name, self), file=sys.stderr)
        if strict and not self.passed:
            raise GraphError('%s does not give the same answer on several contexts (%s): see the certificate above'
                             % (name, describe(self.contexts)))

    def __str__(self):
        width = max([len(row.name) for row in self.rows], default=0)
        kinds = {row.kind for row in self.rows}
        what = 'prediction' if kinds <= {'output'} else 'evaluation' if kinds <= {'loss', 'metric'} else 'step'
        n = len(self.contexts)
        lines = ['one %s on one device and on %d context%s (%s)' % (what, n, 's' * (n != 1), describe(self.contexts)),
                 '%-17s  %-*s  %9s  %s' % ('', width, '', 'numbers', 'largest relative difference')]
        lines += ['%-17s  %-*s  %9d  %.1e%s' % (row.kind, width, row.name, row.size, row.difference,
                                                '' if row.difference <= self.tolerance else '  <-- differs')
                  for row in self.rows]
        if self.arbitrary:
            lines.append('not compared, since %s: %s' % (self.why, ', '.join(self.arbitrary)))
        worst = max([row.difference for row in self.rows], default=0)
        verdict = 'same answer' if self.passed else 'NOT the same answer'
        lines.append('%s: the largest difference is %.1e, the tolerance %.1e' % (verdict, worst, self.tolerance))
        return '\n'.join(lines)


def largest(value):
    """The largest absolute value; 0 for no values."""
    return float(np.abs(np.asarray(value, 'float64')).max()) if np.size(value) else 0.0


def relative_difference(value, reference, least=0):
    """The largest difference, relative to the largest value of the reference, or to `least` if that is larger.

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
