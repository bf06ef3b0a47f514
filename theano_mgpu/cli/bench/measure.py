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
        return self.kind, self.n, self.batch


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
        """Of a parallel model that has trained; else None."""
        return getattr(getattr(self.model.train_function, 'function', None), 'timings', None)

    @property
    def n_bytes(self):
        """Bytes of all gradients."""
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
        """A Block of `n_steps` steps."""
        seconds, phases = self.steps(batch, n_steps)
        return Block(kind, n, batch, float(np.mean(seconds)), means(phases))

    def steps_in(self, batch):
        """The number of steps for a block of `BLOCK_SECONDS`."""
        return int(np.clip(BLOCK_SECONDS / np.mean(self.steps(batch, 2)[0]), FEWEST, MOST))


def means(dicts, mean=np.mean):
    """The mean, or median, of each entry of several dicts with the same keys.

    Examples
    --------
    >>> means([{'run': 1.0}, {'run': 2.0}])
    {'run': 1.5}
    """
    return {name: float(mean([each[name] for each in dicts])) for name in dicts[0]}


class Contestant:
    """A number of contexts of this process with a model, which takes turns with others; see `take_turns`.

    Parameters
    ----------
    kind, n, batch
        As of a Block.
    trainee : Trainee
    steps : int
        In a block.
    """

    def __init__(self, kind, n, batch, trainee, steps):
        self.kind, self.n, self.batch = kind, n, batch
        self._trainee, self._steps = trainee, steps

    def turn(self):
        """Train for a block; a list with that Block."""
        time.sleep(SETTLE)
        block = self._trainee.block(self.kind, self.n, self.batch, self._steps)
        if self.n > 1:
            block = block._replace(figures={'reduce_bytes_per_s': reduce_rate(self._trainee.n_bytes, self.n)})
        return [block]


def take_turns(contestants, rounds, bar):
    """Let contestants take turns; the blocks of each key, one a round.

    Parameters
    ----------
    contestants : list
        Each has a method ``turn() -> list of Block``.
    rounds : int
    bar : progress bar
        It advances by one after each turn.

    Returns
    -------
    dict of (kind, n, batch) to list of Block
    """
    found = {}
    for number in range(rounds):
        start = number // 2 % len(contestants)  # a later one begins in each pair of rounds; odd rounds run backwards
        for contestant in (contestants[start:] + contestants[:start])[::-1 if number % 2 else 1]:
            for block in contestant.turn():
                found.setdefault(block.key, []).append(block)
            bar.update(1)
    return found


def median_block(blocks):
    """The medians of several blocks of one key, as a Block.

    Examples
    --------
    >>> median_block([Block('plain', 1, 8, seconds, {}) for seconds in (3, 1, 2)]).seconds
    2.0
    """
    return blocks[0]._replace(seconds=float(np.median([block.seconds for block in blocks])),
                              phases=means([block.phases for block in blocks], np.median),
                              figures=means([block.figures for block in blocks], np.median))


def median_seconds(action, arguments=((),)):
    """Median seconds of a call, over several calls with each of some arguments in turn; each is called once before."""
    for each in arguments:
        action(*each)
    seconds = []
    for number in range(max(REPEATS, len(arguments))):
        start = time.perf_counter()
        action(*arguments[number % len(arguments)])
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def cold_buffers(n_bytes, n=1):
    """Lists of n float32 buffers: enough lists for the first one to have left the caches when the last one is used."""
    size = max(1, n_bytes // 4)
    return [[np.ones(size, 'float32') for _ in range(n)] for _ in range(int(np.clip(COLD // (4 * size * n), 2, 64)))]


def reduce_rate(n_bytes, n):
    """Bytes of gradients a second that the host adds: n buffers into another one, as in a step."""
    from ...replicas.collectives import all_reduce

    def add(*buffers):
        all_reduce(buffers[1:], [1 / n] * n, buffers[0])
    return n * n_bytes / median_seconds(add, cold_buffers(n_bytes, n + 1))


def copy_rate():
    """Bytes a second that NumPy copies in this host's memory."""
    return COLD / 2 / median_seconds(np.copyto, cold_buffers(COLD // 2, 2))


def link_to(context, n_bytes):
    """The Link between the host and a context's device, from messages of 4 and of `n_bytes` bytes there and back."""
    if context.kind == 'cpu':
        return MEMORY
    from pygpu import gpuarray
    device = gpu_context(context)

    def there_and_back(size):
        array = np.ones(size, 'float32')
        return median_seconds(lambda: np.asarray(gpuarray.array(array, context=device))) / 2

    small, large = there_and_back(1), there_and_back(max(2, n_bytes // 4))
    return Link('link to %s' % context.device, small, max(n_bytes, 8) / max(large - small, 1e-9))


def is_cpu(context):
    """Whether a context's device is a CPU, also through OpenCL (PoCL)."""
    return context.kind == 'cpu' or (context.kind == 'opencl' and status(
        context.device, gpu_context(context)).name.startswith(('pthread', 'cpu')))


def busiest(chosen):
    """The largest number of contexts that share one piece of hardware.

    Parameters
    ----------
    chosen : list of Context
    """
    hardware = ['cpu' if is_cpu(context) else context.device for context in chosen]
    return max(map(hardware.count, hardware))
