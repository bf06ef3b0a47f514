"""The measurements of `theano-mgpu bench`: blocks of training steps of several contestants, and rates of the host."""
from __future__ import annotations

import time
from typing import Any, Callable, Sequence

import numpy as np

from ...devices.context_map import Context
from ...devices.contexts import gpu_context
from ...devices.discovery import status
from .models import Recipe
from .scaling import MEMORY, Block, Key, Link, means

SETTLE = 0.05        # seconds before each turn: idle threads of OpenBLAS and OpenMP spin for some milliseconds
BLOCK_SECONDS = 0.08  # seconds of a block: short, so that a busy spell of the machine hits all contestants
FEWEST, MOST = 3, 100  # steps in a block
REPEATS = 7          # runs of an action that takes microseconds
COLD = 1 << 26       # bytes of buffers used in turn, so that no buffer is still in a cache, as in a step


class Trainee:
    """A model that is trained repeatedly on the same samples, and has compiled its functions.

    Parameters
    ----------
    model : keras.Model
        A parallel one, or plain Keras's.
    recipe : Recipe
        Its recipe, which makes the samples.
    sizes : sequence of int
        Samples in each of its batches.
    """

    def __init__(self, model: Any, recipe: Recipe, sizes: Sequence[int]) -> None:
        self.model = model
        self.inputs, self.targets = recipe.data(model, max(sizes))
        for size in sizes:
            self.steps(size, 1)

    @property
    def n_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(weight.get_value(borrow=True).nbytes for weight in self.model._collected_trainable_weights)

    @property
    def scheme(self) -> str:
        """The scheme of `scaling.SCHEMES` in which the contexts add gradients."""
        plan = self.model.train_function.function.plan
        return 'host' if not plan.sums_by_nccl else 'gather' if plan.shares.logical_shards else 'ring'

    @property
    def fits(self) -> str:
        """A sentence on the batches that fit in the memory of the devices; empty for plain Keras, and on CPUs."""
        from ...plan.explain import largest_text  # imports Theano, which the command itself does without
        function: Any = getattr(self.model.train_function, 'function', None)
        estimate = function.built.dry_step.estimate() if hasattr(function, 'built') else None
        return largest_text(estimate, function.plan.shares.grows) if estimate else ''

    def steps(self, batch: int, n: int, before: Callable[[], Any] = lambda: None
              ) -> tuple[list[float], list[dict[str, float]]]:
        """Train n steps on `batch` samples.

        Parameters
        ----------
        batch, n : int
        before : callable
            Called before each step; not timed.

        Returns
        -------
        seconds : list of float
            Of each step.
        phases : list of dict of str to float
            Seconds of each step in each phase, and outside all phases (other).
        """
        inputs, targets = [array[:batch] for array in self.inputs], [array[:batch] for array in self.targets]
        self.model.train_on_batch(inputs, targets)  # untimed: another batch size needs new memory
        # Plain Keras's function has no timings.
        timings = getattr(getattr(self.model.train_function, 'function', None), 'timings', None)
        seconds, phases = [], []
        for _ in range(n):
            if timings:
                timings.reset()
                timings.exact = True
            before()
            start = time.perf_counter()
            self.model.train_on_batch(inputs, targets)
            seconds.append(time.perf_counter() - start)
            phases.append(timings.per_call() if timings else {})
            phases[-1]['other'] = max(0.0, seconds[-1] - sum(phases[-1].values()))
        return seconds, phases

    def turn(self, kind: str, n: int, batch: int, n_steps: int) -> list[Block]:
        """Train for `n_steps` steps, and let the host add gradients of several contexts; return the Block."""
        seconds, phases = self.steps(batch, n_steps)
        rate = {'reduce_bytes_per_s': reduce_rate(self.n_bytes, n)} if kind == 'contexts' and n > 1 else {}
        return [Block(kind, n, batch, float(np.mean(seconds)), means(phases), rate)]

    def steps_in_block(self, batch: int) -> int:
        """Return the number of steps for a block of `BLOCK_SECONDS`."""
        return int(np.clip(BLOCK_SECONDS / np.mean(self.steps(batch, 2)[0]), FEWEST, MOST))


def take_turns(contestants: Sequence[Callable[[], Sequence[Block]]], rounds: int, bar: Any) -> list[dict[Key, Block]]:
    """Return the blocks of each round, in which each contestant trains in turn; the bar advances by one a turn."""
    measured = []
    for number in range(rounds):
        start = number // 2 % len(contestants)  # two rounds a start; odd rounds run backwards
        blocks: dict[Key, Block] = {}
        for contestant in [*contestants[start:], *contestants[:start]][::-1 if number % 2 else 1]:
            time.sleep(SETTLE)
            blocks.update((block[:3], block) for block in contestant())
            bar.update(1)
        measured.append(blocks)
    return measured


def median_seconds(action: Callable[..., Any], arguments: Sequence[Sequence[Any]] = ((),),
                   before: Callable[[], Any] = lambda: None) -> float:
    """Return the median seconds of calls with each of some arguments in turn; a first call of each does not count."""
    seconds = []
    for number in range(len(arguments) + max(REPEATS, len(arguments))):
        before()
        start = time.perf_counter()
        action(*arguments[number % len(arguments)])
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[len(arguments):]))


def cold_buffers(n_bytes: int, n: int) -> list[list[np.ndarray]]:
    """Return so many lists of n float32 buffers that the first has left the caches when the last is used."""
    size = max(1, n_bytes // 4)
    return [[np.ones(size, 'float32') for _ in range(n)] for _ in range(int(np.clip(COLD // (4 * size * n), 2, 64)))]


def reduce_rate(n_bytes: int, n: int) -> float:
    """Return the bytes of gradients a second that the host adds: n buffers into another one, as in a step."""
    from ...comm.host_sum import all_reduce
    return n * n_bytes / median_seconds(lambda total, *buffers: all_reduce(buffers, total),
                                        cold_buffers(n_bytes, n + 1))


def copy_rate() -> float:
    """Return the bytes a second that NumPy copies in this host's memory."""
    return COLD / 2 / median_seconds(np.copyto, cold_buffers(COLD // 2, 2))


def link_to(context: Context, n_bytes: int) -> Link:
    """Measure the Link between the host and a context's device: messages of 4 and of `n_bytes` bytes there and back."""
    if context.kind == 'cpu':
        return MEMORY
    from pygpu import gpuarray

    def one_way(size: int) -> float:
        array = np.ones(size, 'float32')
        return median_seconds(lambda: np.asarray(gpuarray.array(array, context=gpu_context(context)))) / 2

    small, large = one_way(1), one_way(max(2, n_bytes // 4))
    return Link('link to %s' % context.device, small, max(n_bytes, 8) / max(large - small, 1e-9))


def is_cpu(context: Context) -> bool:
    """Return whether a context's device is a CPU, also through OpenCL (PoCL)."""
    return context.kind == 'cpu' or (context.kind == 'opencl' and status(
        context.device, gpu_context(context)).name.startswith(('pthread', 'cpu')))


def most_sharing(contexts: Sequence[Context]) -> int:
    """Return the largest number of contexts that share one piece of hardware."""
    hardware = ['cpu' if is_cpu(context) else context.device for context in contexts]
    return max(map(hardware.count, hardware))
