"""The measurements of `theano-mgpu bench`: blocks of training steps of several contestants, in turns."""
from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from ...errors import MgpuError
from ...utils.tables import counted
from ..limited import environment
from .synthetic_models import Recipe

SETTLE = 0.05        # seconds before each turn: idle threads of OpenBLAS and OpenMP spin for some milliseconds
BLOCK_SECONDS = 0.08  # seconds of a block: short, so that a busy spell of the machine hits all contestants
FEWEST, MOST = 3, 100  # steps in a block


class StepTimes(NamedTuple):
    """The seconds of a step, and in each of its phases; `other` are those outside all phases."""

    seconds: float
    phases: Dict[str, float]


def combined(blocks: Sequence[StepTimes], mean: Callable[..., Any] = np.mean) -> StepTimes:
    """Return the mean, or median, of several Blocks with the same phases.

    Examples
    --------
    >>> combined([StepTimes(2.0, {'run': 1.0}), StepTimes(4.0, {'run': 2.0})])
    StepTimes(seconds=3.0, phases={'run': 1.5})
    """
    return StepTimes(float(mean([block.seconds for block in blocks])),
                 {phase: float(mean([block.phases[phase] for block in blocks])) for phase in blocks[0].phases})


def numbers_to(most: int) -> list[int]:
    """Return the numbers of devices to compare: the powers of 2 below a number, and this one.

    Examples
    --------
    >>> numbers_to(0), numbers_to(3), numbers_to(8)
    ([], [1, 2, 3], [1, 2, 4, 8])
    """
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most] * (most > 0)


class Trainee:
    """A model, a parallel one or plain Keras's, that is trained repeatedly on the same samples, and has compiled."""

    def __init__(self, model: Any, recipe: Recipe, batch_size: int) -> None:
        self.model = model
        self._data = recipe.data(model, batch_size)
        self.step()

    @property
    def fits(self) -> str:
        """A sentence on the batches that fit in the memory of the devices; empty for plain Keras, and on CPUs."""
        from ...plan.explain import largest_text  # imports Theano, which the command itself does without
        from ...plan.largest_batch import estimated
        function: Any = getattr(self.model.train_function, 'function', None)
        estimate = estimated(function.plan, function.built.meter) if hasattr(function, 'built') else None
        return largest_text(estimate, function.plan.shares.grows) if estimate else ''

    def step(self) -> StepTimes:
        """Train a step."""
        # Plain Keras's function has no timings.
        timings = getattr(getattr(self.model.train_function, 'function', None), 'timings', None)
        if timings:
            timings.reset()
            timings.exact = True
        start = time.perf_counter()
        self.model.train_on_batch(*self._data)
        seconds = time.perf_counter() - start
        phases = timings.per_call() if timings else {}
        return StepTimes(seconds, {**phases, 'other': max(0.0, seconds - sum(phases.values()))})

    def block(self, n_steps: int) -> StepTimes:
        """Train some steps; return their mean."""
        self.step()  # does not count: another batch size needs new memory
        return combined([self.step() for _ in range(n_steps)])

    def steps_in_block(self) -> int:
        """Return the number of steps for a block of `BLOCK_SECONDS`."""
        return int(np.clip(BLOCK_SECONDS / self.block(2).seconds, FEWEST, MOST))


@contextlib.contextmanager
def start_ranks(n: int, settings: dict[str, Any]) -> Iterator[Callable[[], StepTimes]]:
    """Start n ranks, which end with the ``with`` block; yield a function that has them train a block of steps.

    For the settings see rank_work.py. Raises an MgpuError if they end before they have answered.
    """
    job: Any = subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n), '--gpus-per-process', '1',
                                 '-m', __package__ + '.rank_work', json.dumps(settings)],
                                env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                universal_newlines=True)
    with job:
        def answer() -> StepTimes:
            for line in job.stdout:
                if line.startswith('['):  # libraries print others, too
                    return StepTimes(*json.loads(line))
            raise MgpuError('%s ended without an answer, with exit code %d: see above' % (
                counted(n, 'rank'), job.wait()))

        def block() -> StepTimes:
            with contextlib.suppress(BrokenPipeError):  # `answer` then says that the job has ended
                os.write(job.stdin.fileno(), b'go\n')
            return answer()

        answer()
        yield block


def take_turns(contestants: Mapping[Any, Callable[[], Any]], rounds: int, bar: Any) -> dict[Any, list[Any]]:
    """Return the measurements of each contestant, one a round, in which all take turns; the bar advances with them."""
    measured: dict[Any, list[Any]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        start = number // 2 % len(names)  # two rounds a start; odd rounds run backwards
        for name in (names[start:] + names[:start])[::-1 if number % 2 else 1]:
            time.sleep(SETTLE)
            measured[name].append(contestants[name]())
            bar.update(1)
    return measured
