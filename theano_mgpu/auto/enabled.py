"""The common part of `enable` for Theano functions and for Keras models."""
from __future__ import annotations

from typing import Callable

from ..checks.verification import VerificationReport
from ..config import check_together
from ..errors import GraphError, in_one_line
from ..options import Options, present_flag
from .report import UsageSummary


class Enabled:
    """The arguments of an `enable`, and its report. A subclass takes part in the making of functions or models.

    Attributes
    ----------
    in_force : Enabled or None
        The one that takes part at present. Each subclass has its own.
    tell : callable
        ``tell(text)`` is called with each message for the user.
    """

    in_force: Enabled | None = None

    def __init__(self, report: UsageSummary, strict: bool, verify: bool, always: bool,
                 tell: Callable[[str], object]) -> None:
        if strict:
            check_together(present_flag, strict=True)
        self.report, self.strict, self.verifies, self._always, self.tell = report, strict, verify, always, tell

    @property
    def always(self) -> bool:
        """True if no batch is left to plain Theano for speed, where it is not checked, or rounds otherwise."""
        options = Options()
        return self._always or options.flags.check > 0 or options.divides_always

    def begin(self) -> None:
        """Take part from now on, in place of the one before."""
        type(self).in_force = self

    @classmethod
    def end(cls) -> None:
        """Leave new functions or models alone from now on."""
        cls.in_force = None

    def notify(self, name: str, text: str) -> None:
        """Tell the user about a function or a model; with `strict`, raise a GraphError."""
        if self.strict:
            raise GraphError('%s %s' % (name, text))
        self.tell('%s %s' % (name, text))

    def show_report(self, name: str, verify: Callable[[], VerificationReport]) -> None:
        """Show the VerificationReport that ``verify()`` returns; the run goes on if there can be none."""
        try:
            report = verify()
        except Exception as error:  # of any class: ops raise their own
            self.notify(name, 'cannot be verified: %s' % in_one_line(error))
            return
        report.show(name, self.strict)
