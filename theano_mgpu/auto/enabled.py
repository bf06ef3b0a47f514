"""The arguments of `enable`, and its messages for the user."""
from __future__ import annotations

import functools
import re
from typing import Any, Callable, Sequence

from ..checks.verification import VerificationReport
from ..errors import GraphError, in_one_line
from ..options import Flags
from .report import Report


class Enabled:
    """The arguments of an `enable`, and its report.

    Attributes
    ----------
    contexts : callable
        ``contexts()`` returns the contexts to run over: a list of Context, or a list for each replica.
    tell : callable
        ``tell(text)`` is called with each message for the user, `tell_once` with one that is the same for all.
    """

    in_force: Enabled | None = None  # the one that takes part in the making of functions and models at present

    def __init__(self, contexts: Callable[[], Sequence[Any]], strict: bool, verify: bool, always: bool,
                 tell: Callable[[str], object]) -> None:
        self.contexts, self.strict, self.verifies, self._always, self.tell = contexts, strict, verify, always, tell
        self.compares = False  # whether a batch was compared, as `verifies` asks
        self.tell_once = functools.lru_cache(None)(tell)
        self.report = Report()
        self._told: set[tuple[str, str]] = set()

    @property
    def always(self) -> bool:
        """True if no batch is left to plain Theano for speed, where it is not checked, or rounds otherwise."""
        flags = Flags.now()
        return self._always or flags.check > 0 or flags.divides_always

    def notify(self, name: str, text: str) -> None:
        """Tell the user about a function or a model once, and note it in the report, whatever the numbers in the text.

        With `strict`, raise a GraphError.
        """
        whole, key = '%s %s' % (name, text), (name, re.sub(r'\d', '', text))
        if self.strict:
            raise GraphError(whole)
        if key not in self._told:
            self._told.add(key)
            self.report.notes.append(whole)
            self.tell(whole)

    def show_report(self, name: str, verify: Callable[[], VerificationReport]) -> None:
        """Show the VerificationReport that ``verify()`` returns; the run goes on if there can be none."""
        try:
            report = verify()
        except Exception as error:  # of any class: ops raise their own
            self.notify(name, 'cannot be verified: %s' % in_one_line(error))
            return
        self.compares = True
        report.show(name, self.strict)
