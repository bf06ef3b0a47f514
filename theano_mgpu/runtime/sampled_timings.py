"""The times of single calls, beside the sums of all calls: for predictions, from the first calls of a function."""
from __future__ import annotations

import statistics
from typing import NamedTuple, Sequence

from .timeline import PHASES, Timings

WARM_UP = 3      # calls before those that are sampled: kernels are built, buffers are allocated
SAMPLED = 20     # calls that are sampled
ENOUGH = 5       # samples for a median
WHOLE = 'whole'  # in place of a phase: a call up to its new values


class Compared(NamedTuple):
    """The seconds of a call on one device, over several contexts, and in the way that is used from now on."""

    one: float
    several: float
    used: float


class SampledTimings(Timings):
    """Timings that also have the times of some of the first calls, one by one.

    Attributes
    ----------
    samples : list of dict of str to float
        The seconds of each phase of a call, and of the whole call under `WHOLE`.
    compared : Compared or None
        The times of both ways, where a choice between one device and several has measured them.
    """

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self.compared: Compared | None = None
        super().__init__(phases)

    def reset(self) -> None:
        super().reset()
        self.samples: list[dict[str, float]] = []
        self._before: dict[str, float] | None = None

    def begin_call(self) -> None:
        """Note the beginning of a call, which may be sampled. A call that fails is not."""
        more = self.calls >= WARM_UP and len(self.samples) < SAMPLED
        self._before = dict(self.seconds) if more else None

    @property
    def is_sampling(self) -> bool:
        """True if the present call may be sampled."""
        return self._before is not None

    def end_call(self, seconds: float) -> None:
        """Add the call that has just been made to the samples; it took some seconds."""
        if self._before is not None:
            sample = {phase: after - self._before.get(phase, 0.0) for phase, after in self.seconds.items()}
            self.samples.append({**sample, WHOLE: seconds})

    def move(self, seconds: float, phase: str, other: str) -> None:
        """Count some seconds of a phase, which may still last, as seconds of another one."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds

    def median(self, phase: str) -> float:
        """Return the median of the seconds of a phase in the calls that were sampled; there is at least one."""
        return statistics.median(sample.get(phase, 0.0) for sample in self.samples)
