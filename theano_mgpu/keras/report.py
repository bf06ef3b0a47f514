"""What the models of a process did on their contexts: the summary of `enable`."""
from ..devices.context_map import describe
from ..jobs import mpi_environment
from ..utils.tables import table

KINDS = {'train': 'TRAINED', 'test': 'TESTED', 'predict': 'PREDICTED'}
SHOWN = 20  # models in a table


class Usage:
    """What one model did.

    Attributes
    ----------
    name : str
    contexts : list of Context
        On which it has run.
    samples : dict of str to int
        Of each kind of function: 'train', 'test', 'predict'.
    """

    def __init__(self, name):
        self.name = name
        self.contexts = []
        self.samples = {}
        self._measured = {}  # kind -> (samples, seconds), without the first call, which builds kernels

    def add(self, kind, samples, seconds, contexts=()):
        """Count a call of a function."""
        self.contexts += [context for context in contexts if context not in self.contexts]
        if kind in self.samples:
            n, total = self._measured.get(kind, (0, 0.0))
            self._measured[kind] = n + samples, total + seconds
        self.samples[kind] = self.samples.get(kind, 0) + samples

    def rate(self, kind):
        """Samples a second; None before the second call."""
        samples, seconds = self._measured.get(kind, (0, 0.0))
        return samples / seconds if seconds else None


class Report:
    """Models, contexts, samples a second, what is not as on one device, and why. Print it.

    Attributes
    ----------
    usages : list of Usage
    notes : list of str
        The notes that were printed, without the advice.
    """

    def __init__(self):
        self.usages = []
        self.notes = []

    def usage(self, name):
        """The Usage of one more model."""
        self.usages.append(Usage(name))
        return self.usages[-1]

    def __bool__(self):
        return bool(self.notes or any(usage.samples for usage in self.usages))

    def __str__(self):
        used = [usage for usage in self.usages if usage.samples]
        kinds = [kind for kind in KINDS if any(kind in usage.samples for usage in used)]
        contexts = list(dict.fromkeys(context for usage in used for context in usage.contexts))
        together = ' in each of %d processes' % mpi_environment.size() if mpi_environment.trains_together() else ''
        lines = ['no model ran on the contexts']
        if used:
            lines = ['%d model%s on %d context%s (%s)%s' % (len(used), 's' * (len(used) != 1), len(contexts),
                                                            's' * (len(contexts) != 1), describe(contexts), together)]
            rows = [['MODEL', 'CONTEXTS'] + [title for kind in kinds for title in (KINDS[kind], 'SAMPLES/S')]]
            rows += [_row(usage, kinds) for usage in used[:SHOWN]]
            lines.append(table(rows, right=set(range(2, len(rows[0])))))
        if len(used) > SHOWN:
            lines.append('and %d models more' % (len(used) - SHOWN))
        return '\n'.join(lines + ['note: ' + note for note in self.notes])


def _row(usage, kinds):
    row = [usage.name, ' '.join(context.name for context in usage.contexts)]
    for kind in kinds:
        rate = usage.rate(kind)
        row += ['{:,}'.format(usage.samples[kind]) if kind in usage.samples else '-',
                '{:,.0f}'.format(rate) if rate else '-']
    return row
