"""The costs of a training step on the devices here, from which the cost model predicts other devices."""
from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

from theano_mgpu.comm.host_sum import all_reduce
from theano_mgpu.devices import discovery, nccl
from theano_mgpu.devices.context_map import Context
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.plan import Machine, StepPlan, buckets
from theano_mgpu.runtime.building import divide, plan_of

import numpy as np
from cost_model import EVERY_DEVICE, MEMORY, PARTS, CostModel, Link, Network, Row, fit_line

# The part that each phase of a measured step belongs to; the time outside all phases is the host's own work.
PART_OF = {'scatter': 'input', 'host_to_device': 'input', 'launch': 'compute', 'run': 'compute',
           'device_to_host': 'exchange', 'wait': 'exchange', 'all_reduce': 'exchange', 'exchange': 'exchange',
           'update': 'update', 'broadcast': 'exchange'}
SHORTEST = 1e-9      # seconds; lines are fitted to times above zero
REPEATS = 7          # runs of an action that takes microseconds
COLD = 1 << 26       # bytes of buffers used in turn, so that no buffer is still in a cache, as in a step

Key = Tuple[str, int, int]  # kind, n and batch of a Block


class Block(NamedTuple):
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
        Of a step.
    phases : dict of str to float
        Seconds of a step in each phase, and outside all phases (other).
    figures : dict of str to float
        Further measurements: how fast the host adds, and the link between ranks.
    """

    kind: str
    n: int
    batch: int
    seconds: float
    phases: Dict[str, float]
    figures: Dict[str, float] = {}

    @property
    def parts(self) -> dict[str, float]:
        """The seconds in each part of the model."""
        parts = dict.fromkeys(PARTS, 0.0)
        for phase, seconds in self.phases.items():
            parts[PART_OF.get(phase, 'dispatch')] += seconds
        return parts


def means(dicts: Sequence[dict[str, float]], mean: Callable[..., Any] = np.mean) -> dict[str, float]:
    """Return the mean, or median, of each entry of several dicts with the same keys.

    Examples
    --------
    >>> means([{'run': 1.0}, {'run': 2.0}])
    {'run': 1.5}
    """
    return {name: float(mean([each[name] for each in dicts])) for name in dicts[0]}


def costs_of(blocks: Sequence[Block], n_bytes: float, reduce_bytes_per_s: float = math.inf) -> CostModel:
    """Return the CostModel of a step on one device.

    Parameters
    ----------
    blocks : sequence of Block
        Of one context at two batch sizes or more.
    n_bytes : float
        Of all gradients.
    reduce_bytes_per_s : float
        Rate at which the host adds gradients.
    """
    sizes = [block.batch for block in blocks]
    seconds = {part: [max(block.parts[part], SHORTEST) for block in blocks] for part in PARTS}
    input_fixed_s, input_s = fit_line(sizes, seconds['input'])
    return CostModel(*fit_line(sizes, seconds['compute']), float(np.median(seconds['update'])), n_bytes, input_s,
                     input_fixed_s + float(np.median(seconds['dispatch'])),
                     min(block.phases.get('launch', 0.0) for block in blocks), reduce_bytes_per_s)


class Findings(NamedTuple):
    """All blocks of a measurement, and the table, costs and predictions derived from them.

    Attributes
    ----------
    rounds : list of dict of (kind, n, batch) to Block
        One measurement of each key a round.
    batch_size : int
        Samples in the whole batch.
    n_bytes : int
        Of all gradients.
    sharing : list of int
        For 1, 2, ... contexts: the largest number of them that share one piece of hardware.
    link : Link
        To the contexts' devices.
    updates_on : {'device', 'sharded', 'host'}
        Where the update is computed: by each context, each a part of it, or once for all contexts.
    overlaps : bool
        Whether gradients are exchanged while others are computed.
    scheme : {'host', 'ring', 'blocks'}
        The way in which the contexts here add gradients: through the host, or by NCCL.
    planned : tuple of str
        The schemes that the plan chooses for devices of one host, and of several, each with hardware of its own.
    fits : str
        A sentence on the batches that fit in the memory of all devices; empty if it is not known.
    logical_shards : int
        Parts that a batch is divided into; 0 for one part a device.
    """

    rounds: Sequence[Dict[Key, Block]]
    batch_size: int
    n_bytes: int
    sharing: Sequence[int]
    link: Link = MEMORY
    updates_on: str = 'device'
    overlaps: bool = False
    scheme: str = 'host'
    planned: Tuple[str, ...] = ('host', 'host')
    fits: str = ''
    logical_shards: int = 0

    @property
    def medians(self) -> dict[Key, Block]:
        """The median Block of each key."""
        return {key: block._replace(seconds=float(np.median([each[key].seconds for each in self.rounds])),
                                    phases=means([each[key].phases for each in self.rounds], np.median),
                                    figures=means([each[key].figures for each in self.rounds], np.median))
                for key, block in self.rounds[0].items()}

    def model(self, blocks: dict[Key, Block], kind: str = 'contexts', n: int = 1) -> CostModel:
        """Return the CostModel of n contexts or ranks here.

        Parameters
        ----------
        blocks : dict of (kind, n, batch) to Block
            The measurements of one round, or the medians.
        kind : {'contexts', 'ranks'}
        n : int
        """
        single = ('contexts', 1) if kind == 'contexts' else ('apart', n)
        figures = blocks[kind, n, self.batch_size].figures
        model = costs_of([block for block in blocks.values() if block[:2] == single], self.n_bytes,
                         figures.get('reduce_bytes_per_s', math.inf))._replace(
            divides_update=self.updates_on == 'sharded', logical_shards=self.logical_shards,
            pieces=most_buckets(self.n_bytes) if self.overlaps else 1)
        if kind == 'ranks':
            return model._replace(network=Network(MEMORY, Link('between ranks', figures['latency_s'],
                                                               figures['bytes_per_s']), 1))
        sharing = self.sharing[n - 1]
        return model._replace(network=Network(self.link, None, EVERY_DEVICE), sharing=sharing, scheme=self.scheme,
                              update_s=model.update_s / (sharing if self.updates_on == 'host' else 1))

    def rows(self) -> list[Row]:
        """Return the rows of the table: a dict for plain Keras, for each number of contexts and of ranks.

        A row of several has a check of the model: seconds predicted and measured, and predicted / measured - 1 (error).
        Each round is predicted from its own measurements, so that a slow period of the machine affects both sides; the
        error is the median over the rounds.
        """
        rows, medians = [], self.medians
        for (kind, n, batch), block in medians.items():
            if kind == 'apart' or batch != self.batch_size:
                continue
            seconds = [blocks[kind, n, batch].seconds for blocks in self.rounds]
            gain = medians['ranks' if kind == 'ranks' else 'contexts', 1, batch].seconds / block.seconds
            row = dict(kind=kind, n=n, samples_per_s=batch / block.seconds, seconds=block.seconds, lowest=min(seconds),
                       highest=max(seconds), speedup=gain, efficiency=gain / n, phases=block.phases, parts=block.parts,
                       figures=block.figures, rounds=seconds)
            if n > 1:
                ratios = [sum(self.model(blocks, kind, n).parts(n, batch).values()) / measured
                          for blocks, measured in zip(self.rounds, seconds)]
                error = float(np.median(ratios)) - 1
                row['check'] = dict(kind=kind, n=n, predicted=block.seconds * (1 + error), measured=block.seconds,
                                    error=error, parts=self.model(medians, kind, n).parts(n, batch))
            rows.append(row)
        return rows


def most_buckets(n_bytes: float) -> int:
    """Return the most buckets of gradients with `n_bytes` in all.

    Examples
    --------
    >>> most_buckets(buckets.LEAST), most_buckets(3.5 * buckets.LEAST), most_buckets(100 * buckets.LEAST)
    (1, 3, 8)
    """
    return int(min(buckets.MOST, max(1, n_bytes // buckets.LEAST)))


def bytes_of_gradients(model: Any) -> int:
    """Return the bytes of all gradients of a keras.Model."""
    return sum(weight.get_value(borrow=True).nbytes for weight in model._collected_trainable_weights)


def scheme_of(plan: StepPlan) -> str:
    """Return the scheme of `cost_model.SCHEMES` in which a plan has the gradients added."""
    groups = [group for part in plan.parts for group in part.sums]
    # Gradients are most of the arrays; the loss may go another way.
    ways = {sum(each.variable.ndim for each in group.exchanges): group.way for group in groups}
    if not ways or not ways[max(ways)].by_devices:
        return 'host'
    return 'blocks' if plan.shares.logical_shards else 'ring'


def planned_schemes(function: Any) -> tuple[str, ...]:
    """Return the schemes that plans choose for devices as a function has them, on one host and on several.

    Two devices, and two hosts of two, stand for any number; plans are made without a device.
    """
    first, options = function.contexts[0], function.options
    pair = [first._replace(name='device %d' % i) for i in range(2)]
    against = nccl.reason_against([first], options.flags.collectives)
    schemes = []
    for hosts in (1, 2):
        machine = Machine(0, (2,) * hosts, (options.updates_on(pair)[0],) * hosts, (options.flags.overlap,) * hosts,
                          against)
        schemes.append(scheme_of(plan_of(divide(*function._definition, options, pair, hosts), options, machine)))
    return tuple(schemes)


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
    """Return lists of n float32 buffers: enough lists to push the first one out of the caches."""
    size = max(1, n_bytes // 4)
    return [[np.ones(size, 'float32') for _ in range(n)] for _ in range(int(np.clip(COLD // (4 * size * n), 2, 64)))]


def reduce_rate(n_bytes: int, n: int) -> float:
    """Return the bytes of gradients a second that the host adds: n buffers into another one, as in a step."""
    return n * n_bytes / median_seconds(lambda total, *buffers: all_reduce(buffers, total),
                                        cold_buffers(n_bytes, n + 1))


def copy_rate() -> float:
    """Return the bytes a second that NumPy copies in this host's memory."""
    return COLD / 2 / median_seconds(np.copyto, cold_buffers(COLD // 2, 2))


def link_to(context: Context, n_bytes: int) -> Link:
    """Measure the Link between the host and a context's device: messages of 4 and of `n_bytes` bytes there and back."""
    if context.kind == 'cpu':
        return MEMORY
    from pygpu import gpuarray  # not above: it may not be installed

    def one_way(size: int) -> float:
        array = np.ones(size, 'float32')
        return median_seconds(lambda: np.asarray(gpuarray.array(array, context=gpu_context(context)))) / 2

    small, large = one_way(1), one_way(max(2, n_bytes // 4))
    return Link('link to %s' % context.device, small, max(n_bytes, 8) / max(large - small, 1e-9))


def most_sharing(contexts: Sequence[Context]) -> int:
    """Return the largest number of contexts that share one piece of hardware."""
    hardware = ['cpu' if discovery.type_of(context.device) == 'CPU' else context.device for context in contexts]
    return max(map(hardware.count, hardware))
