"""The part of its time in which a step exchanges gradients: a choice that follows from it, and a note."""
from __future__ import annotations

import math
import statistics

from ..comm import alone
from ..comm.collectives import all_gather_int
from ..devices.nccl import BY_FLAG
from ..options import AUTO, Options
from .executable import Executable

FIRST, LAST = 3, 12  # steps that are timed
NOTICEABLE = 15      # percent of a step: less is hardly worth a step in several pieces, or a note
TIMED = 9            # steps of which each phase is timed, after as many others
OF_SUMS = 'device_to_host', 'all_reduce', 'exchange'


class ExchangeWatch:
    """A watch over the part of its time in which a step exchanges gradients: by NCCL, or with other hosts.

    An exchange within the memory of a host takes the same cores as the computation, so that nothing is gained. What one
    by NCCL takes is planned, from the rate that was measured when the devices were connected.
    """

    def __init__(self, executable: Executable, options: Options) -> None:
        ranks, plan = executable.communicator, executable.plan
        self._ranks, self._over_ranks = ranks, executable.over_ranks
        self._exchange, self._planned = 0.0, plan.nccl_seconds
        self._times: list[float] = []  # of steps
        self._is_over = ranks.on_one_host and not plan.nccl_seconds or options.recomputes or not plan.params or \
            plan.shares.logical_shards > 0 or set(plan.machine.overlap) != {AUTO}

    @property
    def is_settled(self) -> bool:
        """Return whether an exchange by NCCL will stay as it is, so that the time of a step counts for a choice."""
        return self._is_over or not self._planned

    def note(self, seconds: float) -> int:
        """Note the duration of a step; return the percentage of the exchange after the last one, if it is noticeable.

        Every rank makes the call, and gets the same number, the smallest of all; it is 0 otherwise.
        """
        if self._is_over or alone.is_alone():
            return 0
        self._times.append(seconds)
        if len(self._times) < FIRST:
            self._exchange = self._over_ranks.seconds
        if len(self._times) < LAST:
            return 0
        self._is_over, times = True, self._times[FIRST - 1:]
        part = self._planned / statistics.median(times) if self._planned else \
            (self._over_ranks.seconds - self._exchange) / sum(times)
        own = math.ceil(100 * part)
        least = min(all_gather_int(self._ranks, own))
        return least if least >= NOTICEABLE else 0


class HostSums:
    """A watch over the cost of sums of several cards through the host: in some steps each phase is timed."""

    def __init__(self, executable: Executable) -> None:
        plan, self._timings = executable.plan, executable.timings
        cards = {context.device for context in plan.mesh.contexts if context.kind == 'cuda'}
        self._why, self._steps, self._before = plan.machine.against_nccl, 0, 0.0
        self._is_over, self._times = len(cards) < 2 or self._why in ('', BY_FLAG), False
        self._measured: list[tuple[float, float]] = []  # seconds of sums, and of the step

    def note(self, seconds: float) -> str:
        """Note the duration of a step; return a sentence on the cost, if it is noticeable, after the last one."""
        if self._is_over or self._timings.waits() != self._times:  # others time the phases
            self._is_over = True
            return ''
        now = sum(self._timings.seconds.get(phase, 0) for phase in OF_SUMS)
        self._measured += [(now - self._before, seconds)] * self._times
        self._steps, self._before = self._steps + 1, now
        self._timings.exact = self._times = len(self._measured) < TIMED <= self._steps
        self._is_over = len(self._measured) == TIMED
        if not self._is_over:
            return ''
        taken, whole = map(statistics.median, zip(*self._measured))
        return 'sums of the cards go through the host, %.2g of %.2g ms of a step: %s' % (
            1e3 * taken, 1e3 * whole, self._why) if 100 * taken > NOTICEABLE * whole else ''
