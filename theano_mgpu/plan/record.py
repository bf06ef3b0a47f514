"""The plans that a process makes, and what its steps change in them, recorded for an explanation and a summary."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..devices.memory_meter import Meter
from ..utils import rank_process
from .step_plan import Choice, StepPlan


class RecordedPlan(NamedTuple):
    """A plan, what its steps change, by objects with a method `changes`, and the times and the memory of its steps."""

    plan: StepPlan
    changing: Sequence[Any]
    timings: Any
    meter: Meter

    def changes(self) -> list[Choice]:
        """Return the choices that the steps have changed."""
        return [choice for each in self.changing for choice in each.changes()]

    def exchange_seconds(self) -> float:
        """Return the seconds of a step in which values are copied and added; 0 where devices are not waited for."""
        is_known = self.timings.waits() or not self.plan.mesh.on_devices
        phases = self.timings.per_call().items() if is_known else ()
        return sum(seconds for phase, seconds in phases if phase not in ('launch', 'run', 'update'))


_recorded: list[RecordedPlan] | None = None
changes: dict[str, None] = {}  # that `note_change` has told, each once


def note_change(text: str) -> None:
    """Tell the user of a change in how a function is computed, and keep it for the summary."""
    rank_process.note(text)
    changes[text] = None


def record() -> list[RecordedPlan]:
    """Begin to record, and return the list that grows."""
    global _recorded
    _recorded = []
    return _recorded


def note(*recorded: Any) -> None:
    """Add a plan, if plans are recorded, with the arguments of `RecordedPlan`."""
    if _recorded is not None:
        _recorded.append(RecordedPlan(*recorded))


def forget(timings: Any) -> None:
    """Remove the plan with these timings, because it was built again."""
    if _recorded is not None:
        _recorded[:] = [each for each in _recorded if each.timings is not timings]
