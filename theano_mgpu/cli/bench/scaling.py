"""A model of data-parallel training: the time of a step on n devices, from measured costs and properties of links.

A step of n devices on b samples takes the sum of

    input     i b / h                each of h hosts divides its own samples
    dispatch  o + (d-1) l + s f      a process's own work; each further launch; a device's time without samples
    compute   s c ceil(b / n)        the only part that shrinks with n
    exchange  an all_reduce          see links.py; nothing for a single device; less what overlap hides, see below
    update    s u                    each device does the whole update; s u / n if it is divided among them

with d devices on a host, and s devices that share one piece of hardware: `cpu` contexts of one process run one after
the other, so s = n for them.

With overlap the backward pass is computed in p pieces, and the gradients of each but the last one are exchanged while
the next ones are computed. That hides (p - 1) / p of the exchange at most, and no more than (p - 1) / p of the backward
pass, which is 2/3 of compute: it takes twice the operations of the forward pass (Kaplan et al., 2020,
arXiv:2001.08361). Devices that share hardware hide nothing.

*Strong* scaling keeps the size of the whole batch, *weak* scaling that of each device's sub-batch. Strong is the
default: it applies when a script changes only the number of devices, and the result stays that of one device. More
samples in a step change the training.
"""
import math
from collections import namedtuple

import numpy as np

from .links import SCHEMES

PARTS = ('input', 'dispatch', 'compute', 'exchange', 'update')
BACKWARD = 2 / 3  # of compute
MOST_SAMPLES = 1 << 30  # in a batch that is looked for
PAYS = 0.7  # n devices pay where their efficiency, speedup / n, is at least this


class Costs(namedtuple('Costs', 'fixed_s sample_s update_s n_bytes input_s host_s launch_s reduce_bytes_per_s '
                       'divides_update pieces', defaults=(0.0, 0.0, 0.0, math.inf, False, 1))):
    """The costs of a step, as measured on one device.

    Attributes
    ----------
    fixed_s : float
        Seconds that the device takes whatever the number of samples (f above).
    sample_s : float
        Seconds a sample (c).
    update_s : float
        Seconds of the update (u).
    n_bytes : int
        Of all gradients (B).
    input_s : float
        Seconds of the host a sample (i).
    host_s : float
        Seconds of the host a step (o): Python, Keras.
    launch_s : float
        Seconds of the host for each further device (l).
    reduce_bytes_per_s : float
        Bytes of gradients that the host adds a second (gamma).
    divides_update : bool
        Whether each device computes a part of the update, as with ``update_on='sharded'``. What is exchanged
        has as many bytes then: each device gets its part of the gradients, and the new parameters of all parts.
    pieces : int
        Pieces of the backward pass (p); 1 without overlap.
    """


def fit_line(sizes, seconds):
    """Fit seconds for no samples and seconds a sample, neither negative, by least squares of the relative errors.

    Parameters
    ----------
    sizes : list of int
        At least two different ones.
    seconds : list of float
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
    if y - slope * x < 0:
        return 0.0, float(y / x)
    return float(y - max(slope, 0.0) * x), max(slope, 0.0)


def step_parts(costs, n, batch, network=None, scheme='host', sharing=1):
    """Return the seconds of each part of a step.

    Parameters
    ----------
    costs : Costs
    n : int
        Devices.
    batch : int
        Samples in the whole batch.
    network : Network, optional
        None for devices that exchange nothing.
    scheme : {'host', 'ring', 'hierarchical'}
    sharing : float
        How many devices share one piece of hardware: 1 if each has its own.

    Returns
    -------
    dict of str to float
        A value for each of `PARTS`.

    Examples
    --------
    >>> from theano_mgpu.cli.bench.links import parse_network
    >>> parts = step_parts(Costs(0.001, 0.0001, 0.002, 4e6), 2, 100, parse_network('0:8'))
    >>> [(part, round(seconds, 6)) for part, seconds in parts.items()]
    [('input', 0.0), ('dispatch', 0.001), ('compute', 0.005), ('exchange', 0.002), ('update', 0.002)]
    """
    hosts, devices = network.divided(n) if network else (1, n)
    compute = sharing * costs.sample_s * -(-batch // n)
    exchange = SCHEMES[scheme](n, costs.n_bytes, network, costs.reduce_bytes_per_s) if network else 0.0
    if sharing == 1:
        exchange -= (1 - 1 / costs.pieces) * min(exchange, BACKWARD * compute)
    return {'input': costs.input_s * batch / hosts,
            'dispatch': costs.host_s + (devices - 1) * costs.launch_s + sharing * costs.fixed_s,
            'compute': compute,
            'exchange': exchange,
            'update': sharing * costs.update_s / (n if costs.divides_update else 1)}


def step_seconds(costs, n, batch, network=None, scheme='host', sharing=1):
    """Return the seconds of a step; arguments as for `step_parts`."""
    return sum(step_parts(costs, n, batch, network, scheme, sharing).values())


def speedup(costs, n, batch, network=None, scheme='host', sharing=1, weak=False):
    """Return the speedup: samples a second of n devices / samples a second of one device.

    Parameters
    ----------
    weak : bool
        Whether `batch` is the size of each device's sub-batch, not that of the whole batch.

    Examples
    --------
    >>> speedup(Costs(0, 0.001, 0.1, 0), 4, 100), speedup(Costs(0, 0.001, 0.1, 0), 4, 100, weak=True)
    (1.6, 4.0)
    """
    growth = n if weak else 1
    return growth * step_seconds(costs, 1, batch) / step_seconds(costs, n, growth * batch, network, scheme, sharing)


def limit(parts):
    """Return the part that limits a step: compute if it is half of the step or more, else the largest other part.

    Examples
    --------
    >>> limit({'compute': 8, 'exchange': 3, 'update': 1}), limit({'compute': 4, 'exchange': 3, 'update': 2})
    ('compute', 'exchange')
    """
    if parts['compute'] >= 0.5 * sum(parts.values()):
        return 'compute'
    return max((part for part in parts if part != 'compute'), key=parts.get)


def batch_that_pays(costs, n, network=None, scheme='host', sharing=1, efficiency=PAYS):
    """Return the smallest batch with which n devices reach an efficiency.

    Parameters
    ----------
    efficiency : float
        Speedup over one device / n; ``1 / n`` means as fast as one device.

    Returns
    -------
    int or None
        Samples in the whole batch, a multiple of n; None if no batch of up to `MOST_SAMPLES` is enough.

    Examples
    --------
    >>> costs = Costs(fixed_s=0, sample_s=0.001, update_s=0.1, n_bytes=0)
    >>> batch_that_pays(costs, 2, efficiency=0.7), batch_that_pays(costs, 4, efficiency=1)
    (134, None)
    """
    def pays(multiple):
        return (efficiency * n * step_seconds(costs, n, n * multiple, network, scheme, sharing)
                <= step_seconds(costs, 1, n * multiple))

    # Over multiples of n one device's step is a straight line, and that of n devices is convex.
    low, high = 0, 1
    while not pays(high):
        low, high = high, 2 * high
        if n * high > MOST_SAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return n * high
