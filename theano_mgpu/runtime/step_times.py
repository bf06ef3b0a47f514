"""The times of the functions that a process divides among GPUs, recorded for a comparison with several processes."""
from __future__ import annotations

from typing import NamedTuple

from ..plan.buckets import bytes_of_gradients
from .executable import Executable
from .executors import SerialExecutor
from .sampled_timings import ENOUGH, WHOLE, SampledTimings


class StepTimes(NamedTuple):
    """The times of one function.

    Attributes
    ----------
    name : str
    replicas : int
        Among which a batch is divided: a device of its own for each.
    n_bytes : float
        Bytes of the gradients that the host adds; 0 where devices add them by NCCL.
    waits : tuple of str
        The phases in which the host waits for the devices.
    timings : SampledTimings
    """

    name: str
    replicas: int
    n_bytes: float
    waits: tuple[str, ...]
    timings: SampledTimings

    @property
    def are_known(self) -> bool:
        """True if enough calls were made for a median."""
        return len(self.timings.samples) >= ENOUGH

    @property
    def launches(self) -> float:
        """Seconds of a step in which the host launches for all devices of this process, one after the other."""
        return self.timings.median('launch')

    @property
    def waited(self) -> float:
        """Seconds of a step in which the host waits for the devices."""
        return sum(map(self.timings.median, self.waits))

    @property
    def whole(self) -> float:
        """Seconds of a step."""
        return self.timings.median(WHOLE)


_recorded: list[StepTimes] | None = None


def record() -> list[StepTimes]:
    """Begin to record, and return the list that grows."""
    global _recorded
    _recorded = []
    return _recorded


def note(executable: Executable) -> None:
    """Add a function, if times are recorded and it is divided among GPUs.

    Functions that block inside are left out, as the launches for one device are not over before it has computed. So are
    placed functions, whose devices wait for each other.
    """
    plan = executable.plan
    if _recorded is None or plan.shares.n_replicas == 1 or len(plan.mesh.places) > 1 or \
            any(context.kind == 'cpu' for context in plan.mesh.contexts) or \
            not isinstance(executable.launcher.executor, SerialExecutor):
        return
    program, by_nccl = plan.program, plan.sums_by_nccl
    new = dict(zip(program.updated, (each.variable for each in program.outputs[-len(program.updated):])))
    n_bytes = 0.0 if by_nccl else sum(bytes_of_gradients(program.every_exchange, plan.params, new).values())
    _recorded.append(StepTimes(plan.name or 'a function', plan.shares.n_replicas, n_bytes,
                               ('run', 'exchange') if by_nccl else ('run',), executable.timings))


def forget(timings: SampledTimings) -> None:
    """Remove the function with these timings, because it was built again."""
    if _recorded is not None:
        _recorded[:] = [each for each in _recorded if each.timings is not timings]
