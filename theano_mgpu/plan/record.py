"""The plans that a process makes, recorded for an explanation."""
from __future__ import annotations

from typing import Any, NamedTuple

from .step_plan import StepPlan


class Recorded(NamedTuple):
    """A plan, the splitter that knows the shapes of its first batch, and the times of its steps."""

    plan: StepPlan
    splitter: Any
    timings: Any


_recorded: list[Recorded] | None = None


def record() -> list[Recorded]:
    """Begin to record, and return the list that grows."""
    global _recorded
    _recorded = []
    return _recorded


def note(plan: StepPlan, splitter: Any, timings: Any) -> None:
    """Add a plan, if plans are recorded."""
    if _recorded is not None:
        _recorded.append(Recorded(plan, splitter, timings))
