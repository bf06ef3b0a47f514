"""What the functions of a process did: the summary of `enable`."""
from ..devices.context_map import describe
from ..jobs import mpi_environment
from ..utils.tables import table

SHOWN = 20  # functions in a table


class FunctionUsage:
    """What one function did.

    Attributes
    ----------
    name : str
    contexts : list of Context
        On which it runs; none for plain Theano.
    why : str
        Why it runs there.
    calls, samples : int
        Those over the contexts.
    """

    def __init__(self, name):
        self.name, self.why = name, 'it was not called often enough to tell'
        self.contexts = []
        self.calls = self.samples = 0

    def add(self, samples):
        """Count a call over the contexts."""
        self.calls += 1
        self.samples += samples

    def stay(self, why):
        """It runs on one device from now on."""
        self.contexts, self.why = [], why

    def run_on(self, contexts, why):
        """It runs over contexts from now on."""
        self.contexts, self.why = contexts, why


class FunctionReport:
    """Where each function ran, and why. Print it.

    Attributes
    ----------
    usages : list of FunctionUsage
        In the order in which the functions were made.
    """

    def __init__(self):
        self.usages = []

    def usage(self, name):
        """The FunctionUsage of one more function."""
        self.usages.append(FunctionUsage(name))
        return self.usages[-1]

    def __bool__(self):
        return bool(self.usages)

    def __str__(self):
        if not self.usages:
            return 'no Theano function was made'
        divided = [usage for usage in self.usages if usage.contexts]
        contexts = list(dict.fromkeys(context for usage in divided for context in usage.contexts))
        together = ' in each of %d processes' % mpi_environment.size() if mpi_environment.trains_together() else ''
        over = ' on %d context%s (%s)%s' % (len(contexts), 's' * (len(contexts) != 1), describe(contexts), together)
        n = len(self.usages)
        lines = ['%d of %d Theano function%s%s' % (len(divided), n, 's' * (n != 1), over if divided else
                                                   ' ran on several contexts')]
        rows = [['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'WHY']]
        rows += [[usage.name, ' '.join(context.name for context in usage.contexts) or 'one device',
                  '{:,}'.format(usage.calls) if usage.calls else '-',
                  '{:,}'.format(usage.samples) if usage.calls else '-', usage.why] for usage in self.usages[:SHOWN]]
        lines.append(table(rows, right={2, 3}))
        if n > SHOWN:
            lines.append('and %d functions more' % (n - SHOWN))
        return '\n'.join(lines)
