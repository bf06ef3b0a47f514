"""The summary of `enable` for Theano functions: where each one ran, and why."""
from __future__ import annotations

from typing import Sequence

from ..devices.context_map import Context
from ..utils.tables import counted
from .summary import UsageSummary, cell, on_contexts


class FunctionUsage:
    """The place of one function, and its calls.

    Attributes
    ----------
    name : str
    contexts : list of Context
        The contexts that it runs on; none for plain Theano.
    why : str
        Why it runs there.
    calls, samples : int
        Calls over the contexts, and their samples.
    """

    def __init__(self, name: str) -> None:
        self.name, self.why = name, 'it was not called'
        self.contexts: Sequence[Context] = []
        self.calls = self.samples = 0

    def add(self, samples: int) -> None:
        """Count a call over the contexts."""
        self.calls += 1
        self.samples += samples

    def run_on(self, contexts: Sequence[Context], why: str) -> None:
        """Note where it runs from now on: on contexts, or on one device if there are none."""
        self.contexts, self.why = contexts, why


class FunctionReport(UsageSummary):
    """A table of where each function ran, and why. Print it.

    Attributes
    ----------
    usages : list of FunctionUsage
        In the order in which the functions were made.
    """

    usage_class, noun = FunctionUsage, 'function'

    def __bool__(self) -> bool:
        return bool(self.usages)

    def __str__(self) -> str:
        if not self.usages:
            return 'no Theano function was made'
        divided = [usage for usage in self.usages if usage.contexts]
        title = '%d of %s %s' % (len(divided), counted(len(self.usages), 'Theano function'),
                                 on_contexts(divided) if divided else 'ran on several contexts')
        rows = [[usage.name, ' '.join(context.name for context in usage.contexts) or 'one device',
                 cell(usage.calls or None), cell(usage.samples if usage.calls else None), usage.why]
                for usage in self.usages]
        return '\n'.join(self._lines(title, ['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'WHY'], rows, right={2, 3}))
