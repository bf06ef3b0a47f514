"""From the measurements of `theano-mgpu bench` to the model of scaling.py: costs, predictions and their errors."""
import itertools
import math
from typing import NamedTuple

import numpy as np

from .links import EVERY_DEVICE, MEMORY, SCHEMES, Link, Network, in_half
from .measure import median_block
from .scaling import PARTS, Costs, batch_that_pays, fit_line, limit, speedup, step_parts

# The part of the model that each phase of a step belongs to. Time outside all phases is the host's own work.
PART_OF = {'scatter': 'input', 'host_to_device': 'input', 'launch': 'compute', 'run': 'compute',
           'device_to_host': 'exchange', 'wait': 'exchange', 'all_reduce': 'exchange', 'exchange': 'exchange',
           'update': 'update', 'broadcast': 'exchange'}
NUMBERS = [2 ** power for power in range(1, 11)]  # of devices, for which there is a prediction
SHORTEST = 1e-9  # seconds; lines are fitted to times above zero


def parts_of(block):
    """Return the seconds of a measured step in each part of the model; time outside all phases is the host's."""
    parts = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in block.phases.items():
        parts[PART_OF.get(phase, 'dispatch')] += seconds
    parts['dispatch'] += max(0.0, block.seconds - sum(block.phases.values()))
    return parts


def costs_of(blocks, n_bytes, reduce_bytes_per_s=math.inf):
    """Return the Costs of a step on one device.

    Parameters
    ----------
    blocks : list of Block
        Of one context at two batch sizes or more.
    n_bytes : int
        Of all gradients.
    reduce_bytes_per_s : float
        Rate at which the host adds gradients.
    """
    sizes = [block.batch for block in blocks]
    seconds = {part: [max(parts_of(block)[part], SHORTEST) for block in blocks] for part in PARTS}
    fixed_s, sample_s = fit_line(sizes, seconds['compute'])
    input_fixed_s, input_s = fit_line(sizes, seconds['input'])
    return Costs(fixed_s, sample_s, float(np.median(seconds['update'])), n_bytes, input_s,
                 input_fixed_s + float(np.median(seconds['dispatch'])),
                 min(block.phases.get('launch', 0.0) for block in blocks), reduce_bytes_per_s)


class Findings(NamedTuple):
    """All blocks of a measurement, and the tables, costs and predictions derived from them.

    Attributes
    ----------
    rounds : list of dict of (kind, n, batch) to Block
        What was measured in each round.
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
    in_half : bool
        Whether ranks exchange gradients in half precision.
    overlaps : bool
        Whether gradients are exchanged while others are computed.
    """

    rounds: list
    batch_size: int
    n_bytes: int
    sharing: list
    link: Link = MEMORY
    updates_on: str = 'device'
    in_half: bool = False
    overlaps: bool = False

    def each(self, key):
        """List the blocks of a key, one a round."""
        return [blocks[key] for blocks in self.rounds]

    @property
    def medians(self):
        """Return the median Block of each key."""
        return {key: median_block(self.each(key)) for key in self.rounds[0]}

    def rows(self):
        """Return the rows of the table: a dict for plain Keras, for each number of contexts and of ranks."""
        rows, medians = [], self.medians
        for key, block in medians.items():
            if block.kind == 'apart' or block.batch != self.batch_size:
                continue
            base = medians['ranks' if block.kind == 'ranks' else 'contexts', 1, self.batch_size]
            seconds, gain = [each.seconds for each in self.each(key)], base.seconds / block.seconds
            rows.append(dict(kind=block.kind, n=block.n, samples_per_s=block.batch / block.seconds,
                             seconds=block.seconds, lowest=min(seconds), highest=max(seconds), speedup=gain,
                             efficiency=gain / block.n, phases=block.phases, parts=parts_of(block),
                             figures=block.figures, rounds=seconds))
        return sorted(rows, key=lambda row: (['plain', 'contexts', 'ranks'].index(row['kind']), row['n']))

    def costs(self, blocks, kind='contexts', n=1, reduce_bytes_per_s=math.inf):
        """Return the Costs of one context of this process, or of one of n ranks apart, from one Block of each key."""
        from ...plan.buckets import most_buckets  # not above: it imports Theano, which commands do not wait for
        of_kind = [block for block in blocks.values() if (block.kind, block.n) == (kind, n)]
        return costs_of(of_kind, self.n_bytes, reduce_bytes_per_s)._replace(
            divides_update=self.updates_on == 'sharded', pieces=most_buckets(self.n_bytes) if self.overlaps else 1)

    def here(self, blocks, n):
        """Return the Costs of one of n contexts of this process, their Network, and how many share hardware."""
        costs = self.costs(blocks, **blocks['contexts', n, self.batch_size].figures)
        sharing = self.sharing[n - 1]
        if self.updates_on == 'host':
            costs = costs._replace(update_s=costs.update_s / sharing)
        return costs, Network(self.link, None, EVERY_DEVICE), sharing

    def predicted(self, blocks, kind, n):
        """Return the parts of the step of n contexts or ranks here, predicted from what one Block of each key says."""
        if kind == 'contexts':
            costs, network, sharing = self.here(blocks, n)
            return step_parts(costs, n, self.batch_size, network, sharing=sharing)
        figures = blocks[kind, n, self.batch_size].figures
        network = Network(MEMORY, Link('between ranks', figures['latency_s'], figures['bytes_per_s']), 1)
        return step_parts(self.costs(blocks, 'apart', n, figures['reduce_bytes_per_s']), n, self.batch_size,
                          in_half(network) if self.in_half else network)

    def checks(self):
        """Compare the model with the measurement, for each number of contexts and of ranks above 1.

        Each round is predicted from its own measurements, so that a slow period of the machine affects both sides; the
        error is the median over the rounds.

        Returns
        -------
        list of dict
            kind, n; predicted and measured, seconds; error, predicted / measured - 1; parts, seconds predicted.
        """
        checks = []
        for kind, n, batch in sorted(key for key in self.rounds[0] if key[0] in ('contexts', 'ranks') and key[1] > 1):
            seconds = [block.seconds for block in self.each((kind, n, batch))]
            error = float(np.median([sum(self.predicted(blocks, kind, n).values()) / measured
                                     for blocks, measured in zip(self.rounds, seconds)])) - 1
            measured = float(np.median(seconds))
            checks.append(dict(kind=kind, n=n, predicted=measured * (1 + error), measured=measured, error=error,
                               parts=self.predicted(self.medians, kind, n)))
        return checks


def predictions(costs, batch_size, networks):
    """Predict steps and speedups of devices with the measured costs, each with hardware of its own.

    Parameters
    ----------
    costs : Costs
    batch_size : int
        Samples in the whole batch (strong scaling), or of each device (weak).
    networks : dict of str to Network

    Returns
    -------
    list of dict
        One entry for each network, scheme, scaling and number of devices.
    """
    predicted = []
    for (name, network), scheme, weak, n in itertools.product(networks.items(), SCHEMES, (False, True), NUMBERS):
        parts = step_parts(costs, n, batch_size * (n if weak else 1), network, scheme)
        gain = speedup(costs, n, batch_size, network, scheme, weak=weak)
        predicted.append(dict(network=name, scheme=scheme, scaling='weak' if weak else 'strong', devices=n,
                              seconds=sum(parts.values()), speedup=gain, efficiency=gain / n, limit=limit(parts),
                              parts=parts, batch_that_pays=batch_that_pays(costs, n, network, scheme)))
    return predicted
