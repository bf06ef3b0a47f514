"""The plans that a process makes, recorded for an explanation."""
from typing import Any, List, NamedTuple, Optional

from .step_plan import StepPlan


class Recorded(NamedTuple):
    """A plan, and the splitter that knows the shapes of its first batch."""

    plan: StepPlan
    splitter: Any


_recorded: Optional[List[Recorded]] = None


def record() -> List[Recorded]:
    """Begin to record, and return the list that grows."""
    global _recorded
    _recorded = []
    return _recorded


def note(plan: StepPlan, splitter: Any) -> None:
    """Add a plan, if plans are recorded."""
    if _recorded is not None:
        _recorded.append(Recorded(plan, splitter))
