"""A summary of what ran where: a title, a line for each function or model."""
from __future__ import annotations

from typing import Any, Callable, Iterable

from ..devices.context_map import HOST, describe
from ..jobs import mpi_environment
from ..utils.tables import Printed, counted, table

SHOWN = 20  # lines of a table


class UsageSummary(Printed):
    """The result of `enable`. Print it.

    Attributes
    ----------
    usages : list
        One of `usage_class` for each function or model, in the order in which they were made. Each has a `name`, and
        the `contexts` that it runs on.
    """

    usage_class: Callable[[str], Any]
    noun: str  # of a line

    def __init__(self) -> None:
        self.usages: list[Any] = []

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
