"""The times of a function in the ways that a choice between one device and several has compared."""
from __future__ import annotations

from typing import NamedTuple, Sequence

from .timeline import PHASES, Timings

WARM_UP = 3  # calls before those that are timed: kernels are built, buffers are allocated


class Compared(NamedTuple):
    """The seconds of a call on one device, over several contexts, and in the way that is used from now on."""

    one: float
    several: float
    used: float


class SampledTimings(Timings):
    """Timings that also have the times of both ways.

    Attributes
    ----------
    compared : Compared or None
        The times of both ways, where a choice between one device and several has measured them.
    """

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self.compared: Compared | None = None
        super().__init__(phases)

    def move(self, seconds: float, phase: str, other: str) -> None:
        """Count some seconds of a phase, which may still last, as seconds of another one."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds
