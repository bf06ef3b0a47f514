"""The summary of `enable`: where each function ran, of a script or of a Keras model, and why."""
from __future__ import annotations

from time import perf_counter
from typing import Any, Callable, Iterable, Sequence

from ..devices import leases
from ..devices.context_map import HOST, Context, describe
from ..runtime.call_hooks import Computed
from ..utils import mpi_environment
from ..utils.tables import Printed, counted, table
from .choice import STILL_TIMED, Way, word

SHOWN = 20  # lines of the table
NEVER_CALLED = 'it was never called'
NO_SUCCESS = 'no call of it has succeeded'
NO_REASONS = NEVER_CALLED, NO_SUCCESS, '', *(way.value + text for way in (Way.HOST, Way.SEVERAL)
                                            for text in ('', STILL_TIMED))
reports: list[Report] = []  # of each `enable` in this process


class Usage:
    """The place of one function, and its calls.

    Attributes
    ----------
    name : str
        Of a function of a Keras model, the name of the model and the kind: train, test or predict.
    contexts : list of Context
        The contexts that it runs on; none for plain Theano.
    why : str
        Why it runs there.
    calls, samples : int
        Calls over the contexts, and their samples. Of a Keras model, all calls are counted.
    counts_all : bool
        Whether calls of plain Theano are counted, too.
    """

    def __init__(self, name: str) -> None:
        self.name, self.why = name, NEVER_CALLED
        self.contexts: list[Context] = []
        self.calls = self.samples = 0
        self.counts_all = True
        self._first = 0  # samples of the first call, which builds kernels
        self._seconds = 0.0  # of the other calls
        self._is_placed = False

    def begin(self) -> None:
        """Note that it is called."""
        if self.why == NEVER_CALLED:
            self.why = NO_SUCCESS

    def add(self, samples: int, seconds: float = 0.0, contexts: Sequence[Context] = ()) -> None:
        """Count a call; until the place is known, it is where calls were computed."""
        if not self._is_placed:
            self.contexts += [context for context in contexts if context not in self.contexts]
        if self.calls:
            self._seconds += seconds
        else:
            self._first = samples
        self.samples += samples
        self.calls += 1
        if self.why == NO_SUCCESS:
            self.why = ''

    def count(self, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
        """Count a batch of a Keras model, for the summary and for the lease of this process: a hook."""
        self.begin()
        began = perf_counter()
        computed = proceed(inputs)
        seconds = perf_counter() - began
        leases.count(computed.samples, seconds)
        self.add(computed.samples, seconds, computed.contexts)
        return computed

    def explain(self, why: str) -> None:
        """Note why it runs where it does, unless a reason is known."""
        if self.why in NO_REASONS:
            self.why = why

    def run_on(self, contexts: Sequence[Context], why: str) -> None:
        """Note where it runs from now on: on contexts, or by plain Theano if there are none."""
        self.contexts, self.why, self._is_placed = list(contexts), why, True

    def numbers(self) -> tuple[float | None, ...]:
        """Return the calls, their samples, and samples per second; None for an unknown number."""
        if not (self.contexts or self.counts_all):
            return None, None, None
        samples = self.samples - self._first  # none before the second call
        rate = samples / self._seconds if samples and self._seconds else None
        return self.calls or None, self.samples or None, rate


class Report(Printed):
    """A table of where each function ran, and why, and messages for the user. Print it.

    Attributes
    ----------
    usages : list of Usage
        In the order in which the functions were made.
    notes : list of str
        The messages, without the advice.
    """

    def __init__(self) -> None:
        self.usages: list[Usage] = []
        self.notes: list[str] = []
        reports.append(self)

    def usage(self, name: str) -> Usage:
        """Return the usage of one more function."""
        self.usages.append(Usage(name))
        return self.usages[-1]

    def __bool__(self) -> bool:
        return bool(self.usages or self.notes)

    def __str__(self) -> str:
        return '\n'.join([self.without_notes()] + ['note: ' + note for note in self.notes])

    def without_notes(self) -> str:
        """Return the table alone: the user has seen the messages before."""
        if not self.usages:
            return 'no Theano function was made, and no Keras model ran'
        ran = [usage for usage in self.usages if usage.contexts]
        title = '%d of %s %s' % (len(ran), counted(len(self.usages), 'function'),
                                 _on_contexts(ran) if ran else 'ran on several contexts')
        rows = [[usage.name, ' '.join(context.name for context in usage.contexts) or word(Way.HOST),
                 *map(_cell, usage.numbers()), usage.why] for usage in self.usages[:SHOWN]]
        lines = [title, table([['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'SAMPLES/S', 'WHY'], *rows], {2, 3, 4})]
        more = len(self.usages) - SHOWN
        return '\n'.join(lines + ['and %s' % counted(more, 'more function')] * (more > 0))


def _on_contexts(usages: Iterable[Usage]) -> str:
    contexts = dict.fromkeys(context for usage in usages for context in usage.contexts if context != HOST)
    if not contexts:
        return 'on the host'
    each = ' in each of %d processes' % mpi_environment.size() if mpi_environment.trains_together() else ''
    return 'on %s (%s)%s' % (counted(len(contexts), 'context'), describe(contexts), each)


def _cell(number: float | None) -> str:
    return '-' if number is None else '{:,.0f}'.format(number)
