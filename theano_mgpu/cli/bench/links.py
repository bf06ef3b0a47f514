"""Links between devices and between hosts, and the time of an all_reduce over them.

A message of B bytes takes ``alpha + B / beta`` seconds, with a latency alpha and a bandwidth beta (Hockney, The
communication challenge for MPP, 1994). The gradients have B bytes; n devices are on h hosts, d on each. Then an
all_reduce takes

    ring              2 (n-1) alpha + 2 (n-1)/n B / beta
    hierarchical      2 ((d-1) alpha_in + B / beta_in) + a ring over the h hosts
    through the host  2 d (alpha_host + B / beta_host) + d B / gamma + a ring over the h hosts

The ring is that of Patarasuk and Yuan (Bandwidth optimal all-reduce algorithms, 2009); its slowest link counts. The
hierarchical scheme reduces on each host, uses a ring of the hosts, and broadcasts on each host. This package works
through the host: the host fetches the buffers of its devices one after the other, adds them, reading gamma bytes a
second, and sends the mean to each device; hosts, or processes, exchange by MPI.
"""
import math
from collections import namedtuple

from ...errors import MgpuError
from ...parsing import shown

EVERY_DEVICE = 1 << 30  # devices on a host if there is only one host


class Link(namedtuple('Link', 'name latency_s bytes_per_s')):
    """A connection of devices, or of hosts.

    Attributes
    ----------
    name : str
    latency_s : float
        Seconds that an empty message takes.
    bytes_per_s : float
        In one direction.
    """

    def seconds(self, n_bytes):
        """Return the seconds that a message takes.

        Examples
        --------
        >>> Link('a', 1e-3, 1e9).seconds(2e6)
        0.003
        """
        return self.latency_s + n_bytes / self.bytes_per_s


MEMORY = Link('memory', 0.0, math.inf)  # no transfer: the buffer is already where it is needed

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


class Network(namedtuple('Network', 'inner outer per_host')):
    """Links within a host and between hosts, and the number of devices on each host."""

    @property
    def name(self):
        """Return the names of both links."""
        return self.inner.name + (' + ' + self.outer.name if self.outer else '')

    @property
    def to_host(self):
        """Return the link between a device and its host."""
        return TO_HOST.get(self.inner, self.inner)

    def divided(self, n):
        """Return the number of hosts for n devices, and of devices on each.

        Examples
        --------
        >>> Network(LINKS['pcie4'], LINKS['10gbe'], 8).divided(20)
        (3, 8)
        """
        return -(-n // self.per_host), min(n, self.per_host)


def parse_network(text, per_host=8):
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
    inner, plus, outer = text.partition('+')
    return Network(_link(inner, text), _link(outer, text) if plus else None, per_host if plus else EVERY_DEVICE)


def in_half(network):
    """Return the Network for gradients that hosts exchange in half precision, as with ``mgpu.exchange=float16``.

    The time of the conversion is left out.

    Examples
    --------
    >>> in_half(parse_network('pcie4+2000:3')).outer.bytes_per_s
    6000000000.0
    """
    outer = network.outer
    return network._replace(outer=outer and outer._replace(bytes_per_s=2 * outer.bytes_per_s))


def _link(text, whole):
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


def ring_all_reduce(n, n_bytes, link, reduce_bytes_per_s=math.inf):
    """Return the seconds of a ring all_reduce.

    Parameters
    ----------
    n : int
        Devices, or hosts.
    n_bytes : float
    link : Link
    reduce_bytes_per_s : float
        Rate at which the host adds incoming buffers.

    Examples
    --------
    >>> round(ring_all_reduce(4, 8e6, Link('a', 1e-3, 1e9)), 9)
    0.018
    """
    return 2 * (n - 1) * link.latency_s + (n - 1) / n * n_bytes * (2 / link.bytes_per_s + 1 / reduce_bytes_per_s)


def flat_ring(n, n_bytes, network, reduce_bytes_per_s=math.inf):
    """Return the seconds of one ring through all devices of all hosts, determined by its slowest link."""
    used = [network.inner] + [network.outer] * (network.divided(n)[0] > 1)
    slowest = Link('', max(link.latency_s for link in used), min(link.bytes_per_s for link in used))
    return ring_all_reduce(n, n_bytes, slowest)


def hierarchical(n, n_bytes, network, reduce_bytes_per_s=math.inf):
    """Return the seconds to reduce on each host, all_reduce over a ring of hosts, and broadcast on each host.

    Reduce and broadcast are pipelined chains.
    """
    hosts, devices = network.divided(n)
    inside = (devices - 1) * network.inner.latency_s + n_bytes / network.inner.bytes_per_s if devices > 1 else 0.0
    return 2 * inside + _ring_of_hosts(hosts, n_bytes, network)


def through_host(n, n_bytes, network, reduce_bytes_per_s=math.inf):
    """Return the seconds of this package's own scheme: each host fetches, adds and sends back; hosts form a ring."""
    hosts, devices = network.divided(n)
    adding = devices * n_bytes / reduce_bytes_per_s if n > 1 else 0.0
    return (2 * devices * network.to_host.seconds(n_bytes) + adding
            + _ring_of_hosts(hosts, n_bytes, network, reduce_bytes_per_s))


def _ring_of_hosts(hosts, n_bytes, network, reduce_bytes_per_s=math.inf):
    """Return the seconds of a ring between hosts; none for a single host."""
    return ring_all_reduce(hosts, n_bytes, network.outer, reduce_bytes_per_s) if hosts > 1 else 0.0


SCHEMES = {'host': through_host, 'ring': flat_ring, 'hierarchical': hierarchical}
