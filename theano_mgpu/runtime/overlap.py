"""The choice to exchange gradients while the next ones are computed, by the times of the first steps."""
from __future__ import annotations

import math
import statistics

from ..comm import alone
from ..comm.collectives import all_gather_int
from ..options import AUTO, Options
from .executable import Executable

FIRST, LAST = 3, 12  # steps that are timed
NOTICEABLE = 15      # percent of a step: less is hardly worth a step in several pieces


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
