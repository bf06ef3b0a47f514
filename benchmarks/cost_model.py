"""A model of data-parallel training: the time of a step on n devices, from measured costs and properties of links.

A step of n devices on b samples takes the sum of

    input     i b / h                each of h hosts divides its own samples
    dispatch  o + (d-1) l + s f      a process's own work; each further launch; a device's time without samples
    compute   s c ceil(b / n)        the only part that shrinks with n
    exchange  an all_reduce          see below; less the part that overlap hides
    update    s u                    each device does the whole update; s u / n if it is divided among them

with d devices on a host, and s devices that share one piece of hardware: `cpu` contexts of one process run one after
the other, so s = n for them.

A message of B bytes takes ``alpha + B / beta`` seconds, with a latency alpha and a bandwidth beta (Hockney, The
communication challenge for MPP, 1994). An all_reduce of gradients of B bytes takes

    ring              2 (n-1) alpha + 2 (n-1)/n B / beta
    blocks            2 (n-1) alpha + (1+k) (n-1)/n B / beta
    hierarchical      2 ((d-1) alpha_in + B / beta_in) + a ring over the h hosts
    through the host  2 d (alpha_host + B / beta_host) + d B / gamma + a ring over the h hosts

The ring is the one of Patarasuk and Yuan (Bandwidth optimal all-reduce algorithms, 2009); its slowest link counts. The
hierarchical scheme reduces on each host, uses a ring of the hosts, and broadcasts on each host. This package adds by
NCCL, which uses rings, where each context has a CUDA device of its own. Elsewhere it works through the host: the host
fetches the buffers of its devices one after the other, adds them, reading gamma bytes a second, and sends the sum to
each device; hosts, or processes, exchange by MPI.

With logical shards, the busiest device computes more than 1/n of each batch where n does not divide their number, and
takes this share of f alone; a host launches as many for its devices as for one. Each device has k sums for the others,
one for each group of its shards that the tree adds first; k is 1 without logical shards. By blocks, each device
receives 1/n of all sums of the others, adds it, and sends the total to all. Through the host, k sums come, and one goes
back.

With overlap the backward pass is computed in p pieces, and the gradients of each but the last one are exchanged while
the next ones are computed. That hides (p - 1) / p of the exchange at most, and no more than (p - 1) / p of the backward
pass, which is 2/3 of compute: it takes twice the operations of the forward pass (Kaplan et al., 2020,
arXiv:2001.08361). Devices that share hardware hide nothing.

*Strong* scaling keeps the size of the whole batch, *weak* scaling the size of each device's sub-batch. Strong is the
default: it applies when a script changes only the number of devices, and the result is the one-device result. More
samples in a step change the training.
"""
from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Dict, NamedTuple, Sequence

from theano_mgpu.errors import MgpuError
from theano_mgpu.parsing import shown

import numpy as np

PARTS = ('input', 'dispatch', 'compute', 'exchange', 'update')
SCHEMES = {'host': 'through the host', 'ring': 'ring (NCCL)', 'blocks': 'blocks (NCCL)',
           'hierarchical': 'hierarchical'}  # names, and titles
NUMBERS = [2 ** power for power in range(1, 11)]  # numbers of devices with a prediction
BACKWARD = 2 / 3  # of the time of compute
MOST_SAMPLES = 1 << 30  # samples in the largest batch tried
PAYS = 0.7  # n devices pay where their efficiency, speedup / n, is at least this
EVERY_DEVICE = 1 << 30  # devices on a host if there is only one host

Row = Dict[str, Any]


class Link(NamedTuple):
    """A connection of devices, or of hosts: its name, the seconds of an empty message, and bytes a second one way."""

    name: str
    latency_s: float
    bytes_per_s: float


class Network(NamedTuple):
    """Links within a host and between hosts, and the number of devices on each host."""

    inner: Link
    outer: Link | None
    per_host: int

    @property
    def name(self) -> str:
        """The names of both links."""
        return ' + '.join(link.name for link in (self.inner, self.outer) if link)

    def divided(self, n: int) -> tuple[int, int]:
        """Return the number of hosts for n devices, and of devices on each.

        Examples
        --------
        >>> Network(LINKS['pcie4'], LINKS['10gbe'], 8).divided(20)
        (3, 8)
        """
        return -(-n // self.per_host), min(n, self.per_host)


MEMORY = Link('memory', 0.0, math.inf)  # no transfer: the buffer is already where it is needed
ONE_HOST = Network(MEMORY, None, EVERY_DEVICE)

# Values that programs reach, not peak values.
LINKS = {
    # 15.75 GB/s by the standard; NVIDIA's bandwidthTest reaches about 12 from pinned memory, and copies of a few bytes
    # that are waited for take about 10 microseconds.
    'pcie3': Link('PCIe 3.0 x16', 10e-6, 12e9),
    'pcie4': Link('PCIe 4.0 x16', 10e-6, 25e9),        # 31.5 GB/s by the standard, likewise
    # A100: 12 links of 25 GB/s each way by the data sheet; nccl-tests, issues 149 and 178, report an all_reduce's bus
    # bandwidth of 200 GB/s, and issue 331 10 microseconds for one of 8 bytes, which is 2 alpha.
    'nvlink3': Link('NVLink 3', 5e-6, 200e9),
    'nvlink2': Link('NVLink 2', 5e-6, 100e9),          # V100: 6 such links; the same share of them
    # TCP: 1,448 of a frame's 1,538 bytes are content, 94 % of 1.25 GB/s; half a ping-pong through a switch.
    '10gbe': Link('10 Gb Ethernet', 30e-6, 1.17e9),
    # RDMA (RoCE): 4,096 of 4,178 bytes are content, 98 % of 12.5 GB/s less acknowledgements; half a ping-pong.
    '100gbe': Link('100 Gb Ethernet', 5e-6, 11.5e9),
}
# NVLink connects devices with each other; they reach an x86 host by the PCIe version of their generation.
TO_HOST = {LINKS['nvlink2']: LINKS['pcie3'], LINKS['nvlink3']: LINKS['pcie4']}


def parse_network(text: str, per_host: int = 8) -> Network:
    """Parse a Network as written on the command line.

    Parameters
    ----------
    text : str
        ``INNER+OUTER``, or ``INNER`` for one host with all devices. A link is a name in `LINKS`, or
        ``MICROSECONDS:GIGABYTES_PER_SECOND``.
    per_host : int
        Devices on each host.

    Raises
    ------
    MgpuError
        If a link is unknown or malformed.

    Examples
    --------
    >>> parse_network('pcie4+2000:3').outer
    Link(name='2000 us, 3 GB/s', latency_s=0.002, bytes_per_s=3000000000.0)
    """
    inner, *outer = [_parse_link(part, text) for part in text.split('+', 1)]
    return Network(inner, outer[0], per_host) if outer else Network(inner, None, EVERY_DEVICE)


def _parse_link(text: str, whole: str) -> Link:
    """Return the Link that a part of ``INNER+OUTER`` names."""
    if text in LINKS:
        return LINKS[text]
    try:
        latency, gigabytes = map(float, text.split(':'))
        if not (0 <= latency < math.inf and 0 < gigabytes < math.inf):
            raise ValueError
    except ValueError as error:
        raise MgpuError('%s in %s is not a link: give one of %s, or microseconds of latency and gigabytes a second, '
                        'e.g. 5:12; within a host + between hosts, e.g. pcie4+10gbe'
                        % (shown(text), shown(whole), ', '.join(LINKS))) from error
    return Link('%g us, %g GB/s' % (latency, gigabytes), latency * 1e-6, gigabytes * 1e9)


def ring_all_reduce(n: int, n_bytes: float, link: Link, reduce_bytes_per_s: float = math.inf) -> float:
    """Return the seconds of a ring all_reduce of n devices or hosts, which add incoming buffers at some rate.

    Examples
    --------
    >>> round(ring_all_reduce(4, 8e6, Link('a', 1e-3, 1e9)), 9)
    0.018
    """
    return 2 * (n - 1) * link.latency_s + (n - 1) / n * n_bytes * (2 / link.bytes_per_s + 1 / reduce_bytes_per_s)


@functools.lru_cache(maxsize=None)
def division(n: int, logical_shards: int) -> tuple[int, int, float]:
    """Return the parts of a batch for n devices, the parts of the busiest one, and the sums of each for the others.

    0 logical shards are one part a device. The number of sums (k) is the mean over the devices.

    Examples
    --------
    >>> division(4, 6), division(8, 4), division(2, 0)
    ((6, 2, 1.0), (4, 1, 0.5), (2, 1, 1))
    """
    if not logical_shards:
        return n, 1, 1
    from theano_mgpu.comm.tree import Tree  # not above: they import Theano, which other predictions do not wait for
    from theano_mgpu.plan import Machine, Shares
    tree = Tree(0, Shares(Machine(replicas=(n,)), logical_shards=logical_shards).shards_of_replicas([logical_shards]))
    return logical_shards, max(tree.counts), sum(len(tree.nodes_of(i)) for i in range(n)) / n


class CostModel(NamedTuple):
    """The time of a step on n devices like a measured one, each with hardware of its own or not.

    Attributes
    ----------
    fixed_s : float
        Seconds that the device takes whatever the number of samples (f above).
    sample_s : float
        Seconds a sample (c).
    update_s : float
        Seconds of the update (u).
    n_bytes : float
        Bytes of all gradients (B).
    input_s : float
        Seconds of the host a sample (i).
    host_s : float
        Seconds of the host a step (o): Python, Keras.
    launch_s : float
        Seconds of the host for each further device (l).
    reduce_bytes_per_s : float
        Bytes of gradients that the host adds a second (gamma).
    divides_update : bool
        Whether each device computes a part of the update, as with ``update_on='sharded'``. As many bytes are exchanged
        then: each device gets its part of the gradients, and the new parameters of all parts.
    pieces : int
        Pieces of the backward pass (p); 1 without overlap.
    sharing : float
        How many devices share one piece of hardware (s): 1 if each has its own.
    network : Network
        By default devices share the host's memory.
    scheme : {'host', 'ring', 'blocks', 'hierarchical'}
        The way in which gradients are added.
    logical_shards : int
        Parts that a batch is divided into; 0 for one part a device.

    Examples
    --------
    >>> model = CostModel(0.001, 0.0001, 0.002, 4e6, network=parse_network('0:8'))
    >>> [(part, round(seconds, 6)) for part, seconds in model.parts(2, 100).items()]
    [('input', 0.0), ('dispatch', 0.001), ('compute', 0.005), ('exchange', 0.002), ('update', 0.002)]
    >>> model = CostModel(fixed_s=0, sample_s=0.001, update_s=0.1, n_bytes=0)
    >>> model.speedup(4, 100), model.speedup(4, 100, weak=True)
    (1.6, 4.0)
    >>> model.batch_that_pays(2, efficiency=0.7), model.batch_that_pays(4, efficiency=1)
    (134, None)
    """

    fixed_s: float
    sample_s: float
    update_s: float
    n_bytes: float
    input_s: float = 0.0
    host_s: float = 0.0
    launch_s: float = 0.0
    reduce_bytes_per_s: float = math.inf
    divides_update: bool = False
    pieces: int = 1
    sharing: float = 1
    network: Network = ONE_HOST
    scheme: str = 'host'
    logical_shards: int = 0

    def all_reduce(self, n: int) -> float:
        """Return the seconds of an all_reduce over n devices; only hosts take time to add."""
        hosts, devices = self.network.divided(n)
        inner, outer = self.network.inner, self.network.outer or self.network.inner
        *_, sums = division(n, self.logical_shards)
        if self.scheme in ('ring', 'blocks'):
            used = [inner, outer] if hosts > 1 else [inner]
            slowest = Link('', max(link.latency_s for link in used), min(link.bytes_per_s for link in used))
            if self.scheme == 'blocks':
                return (n - 1) * (2 * slowest.latency_s + (1 + sums) / n * self.n_bytes / slowest.bytes_per_s)
            return ring_all_reduce(n, self.n_bytes, slowest)
        if self.scheme == 'hierarchical':  # reduce and broadcast are pipelined chains
            chain = (devices - 1) * inner.latency_s + self.n_bytes / inner.bytes_per_s if devices > 1 else 0.0
            return 2 * chain + ring_all_reduce(hosts, self.n_bytes, outer)
        to_host = TO_HOST.get(inner, inner)
        adding = devices * sums * self.n_bytes / self.reduce_bytes_per_s if n > 1 else 0.0
        return ((1 + sums) * devices * (to_host.latency_s + self.n_bytes / to_host.bytes_per_s) + adding
                + ring_all_reduce(hosts, self.n_bytes, outer, self.reduce_bytes_per_s))

    def parts(self, n: int, batch: int) -> dict[str, float]:
        """Return the seconds of each of `PARTS` of a step of n devices; `batch` has the samples of all."""
        hosts, devices = self.network.divided(n)
        parts, busiest, _ = division(n, self.logical_shards)
        # One device launches all logical shards; several launch as many together.
        own, each = (busiest / parts, 1 / n) if self.logical_shards else (1, 1)
        launches = max(0.0, devices * each - own)  # of others
        compute = self.sharing * self.sample_s * -(-batch * busiest // parts)
        exchange = self.all_reduce(n)
        if self.sharing == 1:
            exchange -= (1 - 1 / self.pieces) * min(exchange, BACKWARD * compute)
        return {'input': self.input_s * batch / hosts,
                'dispatch': self.host_s + launches * self.launch_s + self.sharing * own * self.fixed_s,
                'compute': compute,
                'exchange': exchange,
                'update': self.sharing * self.update_s / (n if self.divides_update else 1)}

    def speedup(self, n: int, batch: int, weak: bool = False) -> float:
        """Return samples a second of n devices / samples a second of one device, which exchanges nothing.

        With `weak`, `batch` is the size of each device's sub-batch, else of the whole batch.
        """
        growth = n if weak else 1
        one = self._replace(network=ONE_HOST, sharing=1).parts(1, batch)
        return growth * sum(one.values()) / sum(self.parts(n, growth * batch).values())

    def batch_that_pays(self, n: int, efficiency: float = PAYS) -> int | None:
        """Return the smallest batch with which n devices reach an efficiency, speedup / n.

        Returns
        -------
        int or None
            Samples in the whole batch, a multiple of n; None if no batch of up to `MOST_SAMPLES` is enough.
        """
        # Over multiples of n, the time of one device is a straight line, and the time of n devices is convex.
        low, high = 0, 1
        while self.speedup(n, n * high) < efficiency * n:
            low, high = high, 2 * high
            if n * high > MOST_SAMPLES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.speedup(n, n * middle) < efficiency * n else (low, middle)
        return n * high


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds for no samples and seconds a sample, neither negative, by least squares of the relative errors.

    Parameters
    ----------
    sizes : sequence of int
        At least two different ones.
    seconds : sequence of float
        Positive.

    Examples
    --------
    >>> fixed, each = fit_line([64, 128], [0.011, 0.021])
    >>> round(fixed, 9), round(each * 64, 9)
    (0.001, 0.01)
    """
    weights = 1 / np.square(seconds)
    x, y = np.average([sizes, seconds], axis=1, weights=weights)
    slope = float(np.sum(weights * (sizes - x) * (seconds - y)) / np.sum(weights * (sizes - x) ** 2))
    slope = min(max(slope, 0.0), float(y / x))
    return float(y - slope * x), slope


def limit(parts: dict[str, float]) -> str:
    """Return the part that limits a step: compute if it is half of the step or more, else the largest other part.

    Examples
    --------
    >>> limit({'compute': 8, 'exchange': 3, 'update': 1}), limit({'compute': 4, 'exchange': 3, 'update': 2})
    ('compute', 'exchange')
    """
    if parts['compute'] >= 0.5 * sum(parts.values()):
        return 'compute'
    return max((part for part in parts if part != 'compute'), key=parts.__getitem__)


def predictions(model: CostModel, batch_size: int, networks: dict[str, Network],
                planned: Sequence[str] = ('host', 'host')) -> dict[Any, Row]:
    """Predict steps and speedups of devices like the measured one, each with hardware of its own.

    Parameters
    ----------
    model : CostModel
    batch_size : int
        Samples in the whole batch (strong scaling), or of each device (weak).
    networks : dict of str to Network
    planned : sequence of str
        The schemes that the plan of a step chooses for devices of one host, and of several.

    Returns
    -------
    dict of (network, scheme, scaling, devices) to dict
        The key's entries by name; whether the plan chooses this scheme (planned); seconds of a step, its parts and its
        limit; speedup and efficiency; the batch that pays, in samples.
    """
    predicted = {}
    schemes = [scheme for scheme in SCHEMES if scheme != ('ring' if model.logical_shards else 'blocks')]  # as by NCCL
    for key in itertools.product(networks, schemes, ('strong', 'weak'), NUMBERS):
        name, scheme, scaling, n = key
        model = model._replace(network=networks[name], scheme=scheme)
        parts = model.parts(n, batch_size * (n if scaling == 'weak' else 1))
        gain = model.speedup(n, batch_size, scaling == 'weak')
        predicted[key] = dict(zip(('network', 'scheme', 'scaling', 'devices'), key), seconds=sum(parts.values()),
                              speedup=gain, efficiency=gain / n, limit=limit(parts), parts=parts,
                              batch_that_pays=model.batch_that_pays(n),
                              planned=scheme == planned[model.network.divided(n)[0] > 1])
    return predicted
