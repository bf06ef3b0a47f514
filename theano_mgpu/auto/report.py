"""The summary of `enable`: where each function or model ran, and why."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

from ..devices.context_map import HOST, Context, describe
from ..utils import mpi_environment
from ..utils.tables import Printed, counted, table
from .choice import Way, word

SHOWN = 20  # lines of a table
NEVER_CALLED = 'it was never called'
summaries: list[UsageSummary] = []  # of each `enable` in this process


class UsageSummary(Printed):
    """The result of `enable`. Print it.

    It has a usage for each function or model, in the order in which they were made, and messages as `notes`.
    """

    usage_class: Callable[[str], Any]
    noun: str  # names the subject of a line

    def __init__(self) -> None:
        self.usages: list[Any] = []
        self.notes: list[str] = []
        summaries.append(self)

    def usage(self, name: str) -> Any:
        """Return the usage of one more function or model."""
        self.usages.append(self.usage_class(name))
        return self.usages[-1]

    def without_notes(self) -> str:
        """Return the summary as text, without messages that the user has seen before."""
        return str(self)

    def _lines(self, title, header, rows, right):
        """Return the lines of the summary; `right` has the columns that are aligned to the right."""
        lines = [title, table([header] + rows[:SHOWN], right)]
        return lines + ['and %s' % counted(len(rows) - SHOWN, 'more ' + self.noun)] * (len(rows) > SHOWN)


def on_contexts(usages: Iterable[Any]) -> str:
    """Return the contexts that usages have, in words."""
    contexts = dict.fromkeys(context for usage in usages for context in usage.contexts if context != HOST)
    if not contexts:
        return 'on the host'
    each = ' in each of %d processes' % mpi_environment.size() if mpi_environment.trains_together() else ''
    return 'on %s (%s)%s' % (counted(len(contexts), 'context'), describe(contexts), each)


def cell(number: float | None) -> str:
    """Return a number for a table; ``-`` for None."""
    return '-' if number is None else '{:,.0f}'.format(number)


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
        self.name, self.why = name, NEVER_CALLED
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
        rows = [[usage.name, ' '.join(context.name for context in usage.contexts) or word(Way.HOST),
                 cell(usage.calls or None), cell(usage.samples or None), usage.why]
                for usage in self.usages]
        return '\n'.join(self._lines(title, ['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'WHY'], rows, right={2, 3}))
