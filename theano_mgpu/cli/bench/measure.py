"""What `theano-mgpu bench` measures: blocks of training steps of several contestants, which take turns."""
import time
from collections import namedtuple

import numpy as np

from ...devices.contexts import gpu_context
from ...devices.discovery import status
from .links import MEMORY, Link

SETTLE = 0.05        # seconds before each turn: idle threads of OpenBLAS and OpenMP spin for some milliseconds
BLOCK_SECONDS = 0.08  # of a block: other programs slow this machine down for seconds, and then for all contestants
FEWEST, MOST = 3, 100  # steps in a block
REPEATS = 7          # of what takes microseconds
COLD = 1 << 26       # bytes that are used in turn, so that none of them are still in a cache, as in a step


class Block(namedtuple('Block', 'kind n batch seconds phases figures', defaults=({},))):
    """Some steps in a row.

    Attributes
    ----------
    kind : {'plain', 'contexts', 'ranks', 'apart'}
        Plain Keras, contexts of one process, or one context in each of several processes: together, or each by
        itself at the same time.
    n : int
        Contexts or processes.
    batch : int
        Samples a step.
    seconds : float
        A step's.
    phases : dict of str to float
        Seconds of a step in each phase; empty for plain Keras.
    figures : dict of str to float
        Further measurements: how fast the host adds, and the link between ranks.
    """

    @property
    def key(self):
        """Return the kind, n and batch, which together name a measurement."""
        return self[:3]


class Trainee:
    """A model that is trained repeatedly on the same samples.

    Parameters
    ----------
    model : keras.Model
        A parallel one, or plain Keras's.
    recipe : Recipe
        That made it.
    largest : int
        Samples in the largest batch.
    """

    def __init__(self, model, recipe, largest):
        self.model = model
        self.inputs, self.targets = recipe.data(model, largest)

    @property
    def timings(self):
        """Return the timings of a parallel model that has trained; else None."""
        return getattr(getattr(self.model.train_function, 'function', None), 'timings', None)

    @property
    def n_bytes(self):
        """Return the bytes of all gradients."""
        return sum(weight.get_value(borrow=True).nbytes for weight in self.model._collected_trainable_weights)

    def steps(self, batch, n, before=lambda: None):
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
            Seconds of each step in each phase.
        """
        inputs, targets = [array[:batch] for array in self.inputs], [array[:batch] for array in self.targets]
        self.model.train_on_batch(inputs, targets)  # after another batch size: new memory, cold caches
        seconds, phases = [], []
        for _ in range(n):
            if self.timings:
                self.timings.reset()
                self.timings.exact = True
            before()
            start = time.perf_counter()
            self.model.train_on_batch(inputs, targets)
            seconds.append(time.perf_counter() - start)
            phases.append(self.timings.per_call() if self.timings else {})
        return seconds, phases

    def block(self, kind, n, batch, n_steps):
        """Train for `n_steps` steps, and have the host add gradients if there are several contexts; return a Block."""
        seconds, phases = self.steps(batch, n_steps)
        rate = {'reduce_bytes_per_s': reduce_rate(self.n_bytes, n)} if kind == 'contexts' and n > 1 else {}
        return Block(kind, n, batch, float(np.mean(seconds)), means(phases), rate)

    def steps_in(self, batch):
        """Return the number of steps for a block of `BLOCK_SECONDS`."""
        return int(np.clip(BLOCK_SECONDS / np.mean(self.steps(batch, 2)[0]), FEWEST, MOST))


def means(dicts, mean=np.mean):
    """Return the mean, or median, of each entry of several dicts with the same keys.

    Examples
    --------
    >>> means([{'run': 1.0}, {'run': 2.0}])
    {'run': 1.5}
    """
    return {name: float(mean([each[name] for each in dicts])) for name in dicts[0]}


def take_turns(contestants, rounds, bar):
    """Let contestants take turns.

    Parameters
    ----------
    contestants : list of callable
        Each trains for a block, and returns a list of Blocks.
    rounds : int
    bar : progress bar
        It advances by one after each turn.

    Returns
    -------
    list of dict of (kind, n, batch) to Block
        The blocks of each round.
    """
    measured = []
    for number in range(rounds):
        start = number // 2 % len(contestants)  # a later one begins in each pair of rounds; odd rounds run backwards
        blocks = {}
        for contestant in (contestants[start:] + contestants[:start])[::-1 if number % 2 else 1]:
            time.sleep(SETTLE)
            blocks.update((block.key, block) for block in contestant())
            bar.update(1)
        measured.append(blocks)
    return measured


def median_block(blocks):
    """Return the medians of several blocks of one key, as a Block.

    Examples
    --------
    >>> median_block([Block('plain', 1, 8, seconds, {}) for seconds in (3, 1, 2)]).seconds
    2.0
    """
    return blocks[0]._replace(seconds=float(np.median([block.seconds for block in blocks])),
                              phases=means([block.phases for block in blocks], np.median),
                              figures=means([block.figures for block in blocks], np.median))


def median_seconds(action, arguments=((),)):
    """Return the median seconds of calls with each of some arguments in turn; a first call of each does not count."""
    seconds = []
    for number in range(len(arguments) + max(REPEATS, len(arguments))):
        start = time.perf_counter()
        action(*arguments[number % len(arguments)])
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[len(arguments):]))


def cold_buffers(n_bytes, n=1):
    """Return so many lists of n float32 buffers that the first has left the caches when the last is used."""
    size = max(1, n_bytes // 4)
    return [[np.ones(size, 'float32') for _ in range(n)] for _ in range(int(np.clip(COLD // (4 * size * n), 2, 64)))]


def reduce_rate(n_bytes, n):
    """Return the bytes of gradients a second that the host adds: n buffers into another one, as in a step."""
    from ...replicas.collectives import all_reduce

    def add(*buffers):
        all_reduce(buffers[1:], buffers[0])
    return n * n_bytes / median_seconds(add, cold_buffers(n_bytes, n + 1))


def copy_rate():
    """Return the bytes a second that NumPy copies in this host's memory."""
    return COLD / 2 / median_seconds(np.copyto, cold_buffers(COLD // 2, 2))


def link_to(context, n_bytes):
    """Measure the Link between the host and a context's device: messages of 4 and of `n_bytes` bytes there and back."""
    if context.kind == 'cpu':
        return MEMORY
    from pygpu import gpuarray
    device = gpu_context(context)

    def one_way(size):
        array = np.ones(size, 'float32')
        return median_seconds(lambda: np.asarray(gpuarray.array(array, context=device))) / 2

    small, large = one_way(1), one_way(max(2, n_bytes // 4))
    return Link('link to %s' % context.device, small, max(n_bytes, 8) / max(large - small, 1e-9))


def is_cpu(context):
    """Return whether a context's device is a CPU, also through OpenCL (PoCL)."""
    return context.kind == 'cpu' or (context.kind == 'opencl' and status(
        context.device, gpu_context(context)).name.startswith(('pthread', 'cpu')))


def busiest(chosen):
    """Return the largest number of contexts that share one piece of hardware.

    Parameters
    ----------
    chosen : list of Context
    """
    hardware = ['cpu' if is_cpu(context) else context.device for context in chosen]
    return max(map(hardware.count, hardware))
