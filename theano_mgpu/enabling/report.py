"""What the functions of a process did: the summary of `enable`."""
from ..utils.tables import counted
from .summary import UsageSummary, cell, on_contexts


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
        self.name, self.why = name, 'it was not called'
        self.contexts = []
        self.calls = self.samples = 0

    def add(self, samples):
        """Count a call over the contexts."""
        self.calls += 1
        self.samples += samples

    def run_on(self, contexts, why):
        """Note where it runs from now on: on contexts, or on one device if there are none."""
        self.contexts, self.why = contexts, why


class FunctionReport(UsageSummary):
    """Where each function ran, and why. Print it.

    Attributes
    ----------
    usages : list of FunctionUsage
        In the order in which the functions were made.
    """

    usage_class, noun = FunctionUsage, 'function'

    def __bool__(self):
        return bool(self.usages)

    def __str__(self):
        if not self.usages:
            return 'no Theano function was made'
        divided = [usage for usage in self.usages if usage.contexts]
        title = '%d of %s %s' % (len(divided), counted(len(self.usages), 'Theano function'),
                                 on_contexts(divided) if divided else 'ran on several contexts')
        rows = [[usage.name, ' '.join(context.name for context in usage.contexts) or 'one device',
                 cell(usage.calls or None), cell(usage.samples if usage.calls else None), usage.why]
                for usage in self.usages]
        return '\n'.join(self._lines(title, ['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'WHY'], rows, right={2, 3}))
