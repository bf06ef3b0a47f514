"""One attempt at a step: a batch is run, checked, and committed or undone."""
from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np

from ..checks.sentinel import Sentinel
from ..comm.activities import AGREE
from ..options import Options
from ..utils.timeline import HOST, note
from . import StepResult, StepRun
from .batch import Batch
from .batches.prefetch import LookAhead
from .building import Built
from .speeds import Speeds
from .step_run import StepAgain


class Runner:
    """The runs of a function that is built in one way, with its options.

    ``check(outputs)`` raises an error where outputs show that the new values are not to be stored.
    """

    def __init__(self, built: Built, options: Options, look_ahead: LookAhead,
                 check: Callable[[list[np.ndarray]], object]) -> None:
        self._executable, self._look_ahead, self._check = built.executable, look_ahead, check
        self._speeds = Speeds(options.name, built.splitter) if built.splitter.shares.adapts else None
        every = options.flags.check
        self._sentinel = Sentinel(built, options.name, every) if every else None

    @property
    def is_settled(self) -> bool:
        """Return whether shares by speed have settled, so that the time of a step counts for a choice."""
        return self._speeds is None or self._speeds.is_settled

    def run(self, step: int, batch: Batch | None, split: Callable[[], Batch]) -> StepResult:
        """Compute a batch on every rank; on an error nothing changes on any rank.

        The batch is None unless it was split and sent ahead; ``split()`` splits it, also a second time.
        """
        executable, ranks, timings = self._executable, self._executable.communicator, self._executable.timings
        began = time.perf_counter()
        batch = batch or split()
        executable.refresh()
        note(timings.seconds, 'scatter', HOST, began)
        if self._sentinel is not None:
            self._sentinel.compare(step)
        speeds = self._speeds
        timed = speeds.timed(batch.split) if speeds else None
        run = StepRun(executable, batch, timed)
        try:
            run.start()
            self._look_ahead.prepare()
            result = run.end()
            if self._sentinel is not None:
                self._sentinel.check(step, result, lambda compute: StepAgain(executable, split(), compute))
            self._check(result.outputs)
            report = speeds.report(batch.split, timed, result.timed) if speeds else []
            reports: Any = [report]
            if ranks.size > 1:
                with timings.span('wait'):
                    reports = ranks.handshake((AGREE, len(report)), report).tolist()
            result.new_values.commit()
        except BaseException:
            run.undo()
            raise
        if speeds and speeds.note(batch.split, reports if timed is not None else []):
            self._look_ahead.forget()  # it was split by the shares before
        return result
