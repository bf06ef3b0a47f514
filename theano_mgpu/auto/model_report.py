"""The summary of `enable`: the work of the models of a process on their contexts."""
from __future__ import annotations

from typing import Sequence

from ..devices import leases
from ..devices.context_map import Context
from ..utils import mpi_environment
from ..utils.tables import counted
from .report import UsageSummary, cell, on_contexts

KINDS = {'train': 'TRAINED', 'test': 'TESTED', 'predict': 'PREDICTED'}


class Usage:
    """The work of one model.

    Attributes
    ----------
    name : str
    contexts : list of Context
        On which it has run.
    samples : dict of str to int
        For each kind of function: 'train', 'test', 'predict'.
    is_used : bool
        Whether a function was asked for, which may have failed before its first batch was computed.
    whole_below : dict of str to int
        For each kind, the number of samples below which batches are not divided, since that is faster.
    why : str
        Why it does not run over several contexts; '' if it does.
    is_left : bool
        Whether plain Keras has the model, so that nothing is counted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.contexts: list[Context] = []
        self.is_used = False
        self.samples: dict[str, int] = {}
        self.whole_below: dict[str, int] = {}
        self.why, self.is_left = '', False
        self._first: dict[str, int] = {}  # kind -> samples of the first call, which builds kernels
        self._seconds: dict[str, float] = {}  # kind -> seconds of the other calls

    def add(self, kind: str, samples: int, seconds: float, contexts: Sequence[Context] = ()) -> None:
        """Count a call of a function."""
        leases.count(samples, seconds)
        self.contexts += [context for context in contexts if context not in self.contexts]
        if kind in self.samples:
            self.samples[kind] += samples
            self._seconds[kind] += seconds
        else:
            self._first[kind], self._seconds[kind] = samples, 0.0
            self.samples[kind] = samples  # last, since Ctrl-C may come between

    def rate(self, kind: str) -> float | None:
        """Return samples per second; None before the second call."""
        samples = self.samples.get(kind, 0) - self._first.get(kind, 0)
        return samples / self._seconds[kind] if samples and self._seconds[kind] else None


class Report(UsageSummary):
    """Models, their contexts, samples per second, and differences from one device with their causes. Print it.

    Attributes
    ----------
    usages : list of Usage
    notes : list of str
        The messages about models, without the advice.
    """

    usage_class, noun = Usage, 'model'

    def __bool__(self):
        return bool(self.notes or any(usage.is_used for usage in self.usages))

    def __str__(self):
        return '\n'.join([self.without_notes()] + ['note: ' + note for note in self.notes])

    def without_notes(self) -> str:
        used = [usage for usage in self.usages if usage.samples or usage.is_left]
        ran = [usage for usage in used if usage.samples]
        begun = [usage.name for usage in self.usages if usage.is_used]
        lines = ['no batch of %s was computed' % ' and '.join(begun) if begun else 'no model ran on the contexts']
        if used:
            kinds = [kind for kind in KINDS if any(kind in usage.samples for usage in used)]
            has_reasons = any(usage.why for usage in used)
            header = ['MODEL', 'CONTEXTS'] + [title for kind in kinds for title in (KINDS[kind], 'SAMPLES/S')]
            rows = [[usage.name, ' '.join(context.name for context in usage.contexts) or 'one device']
                    + [cell(number) for kind in kinds for number in (usage.samples.get(kind), usage.rate(kind))]
                    + [usage.why] * has_reasons for usage in used]
            title = '%s %s' % (counted(len(ran), 'model'), on_contexts(ran)) if ran else lines[0]
            lines = self._lines(title, header + ['WHY'] * has_reasons, rows, right=set(range(2, len(header))))
        for usage in used:
            if usage.whole_below:
                lines.append('%s computes short batches whole%s, which is faster: those of fewer than %s samples' % (
                    usage.name, ' in each process' * mpi_environment.trains_together(),
                    ', '.join('%d (%s)' % (samples, kind) for kind, samples in usage.whole_below.items())))
        return '\n'.join(lines)
