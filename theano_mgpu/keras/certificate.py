"""What `verify` finds: a table of differences between one device and several contexts."""
from collections import namedtuple

from ..context_map import describe

Row = namedtuple('Row', 'kind name size difference')


class Certificate:
    """What `verify` found; printed, a table.

    Attributes
    ----------
    rows : list of Row
        `kind` (loss, metric, gradient, weight, running statistic, optimizer; or output), `name`, `size` (numbers in
        it) and `difference` (the largest one, in relation to the largest value on one device; of gradients, to the
        largest of all).
    tolerance : float
    arbitrary : list of str
        Weights whose gradient is zero but for rounding: their new values are not compared.
    passed : bool
        Whether no difference is above the tolerance.
    """

    def __init__(self, rows, contexts, tolerance, arbitrary=()):
        self.rows, self.tolerance, self.arbitrary = rows, tolerance, list(arbitrary)
        self.contexts = contexts
        self.passed = all(row.difference <= tolerance for row in rows)

    def __str__(self):
        width = max(len(row.name) for row in self.rows)
        what = 'one prediction' if self.rows[0].kind == 'output' else 'one step'
        n = len(self.contexts)
        lines = ['%s on one device and on %d context%s (%s)' % (what, n, 's' * (n != 1), describe(self.contexts)),
                 '%-17s  %-*s  %9s  %s' % ('', width, '', 'numbers', 'largest relative difference')]
        lines += ['%-17s  %-*s  %9d  %.1e%s' % (row.kind, width, row.name, row.size, row.difference,
                                                '' if row.difference <= self.tolerance else '  <-- differs')
                  for row in self.rows]
        if self.arbitrary:
            lines.append('not compared, since the gradient is zero but for rounding: ' + ', '.join(self.arbitrary))
        worst = max(row.difference for row in self.rows)
        verdict = 'same answer' if self.passed else 'NOT the same answer'
        lines.append('%s: the largest difference is %.1e, the tolerance %.1e' % (verdict, worst, self.tolerance))
        return '\n'.join(lines)
