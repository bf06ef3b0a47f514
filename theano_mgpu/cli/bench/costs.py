"""From the measurements of `theano-mgpu bench` to the model of scaling.py: costs, predictions and their errors."""
import numpy as np

from .links import EVERY_DEVICE, MEMORY, SCHEMES, Link, Network, in_half
from .measure import median_block
from .scaling import (
    PAYS,
    Costs,
    batch_that_pays,
    fit_line,
    limit,
    most_devices_that_pay,
    speedup,
    step_parts,
)

# The part of the model that each phase of a step belongs to. Time outside all phases is the host's own work.
PART_OF = {'scatter': 'input', 'host_to_device': 'input', 'launch': 'compute', 'run': 'compute',
           'device_to_host': 'exchange', 'wait': 'exchange', 'all_reduce': 'exchange', 'exchange': 'exchange',
           'update': 'update', 'broadcast': 'exchange'}
NUMBERS = [2 ** power for power in range(1, 11)]  # of devices, for which there is a prediction
SHORTEST = 1e-9  # seconds; lines are fitted to times above zero


def parts_of(block):
    """Seconds of a measured step in each part of the model; time outside all phases is the host's."""
    parts = dict.fromkeys(['input', 'dispatch', 'compute', 'exchange', 'update'], 0.0)
    for phase, seconds in block.phases.items():
        parts[PART_OF.get(phase, 'dispatch')] += seconds
    parts['dispatch'] += max(0.0, block.seconds - sum(block.phases.values()))
    return parts


def costs_of(blocks, n_bytes, reduce_bytes_per_s=float('inf')):
    """The costs of a step on one device.

    Parameters
    ----------
    blocks : list of Block
        Of one context at two batch sizes or more.
    n_bytes : int
        Of all gradients.
    reduce_bytes_per_s : float
        Rate at which the host adds gradients.

    Returns
    -------
    Costs
    """
    sizes = [block.batch for block in blocks]
    parts = [parts_of(block) for block in blocks]

    def line(name):
        return fit_line(sizes, [max(part[name], SHORTEST) for part in parts])
    (fixed, each), (input_fixed, input_each) = line('compute'), line('input')
    return Costs(fixed_s=fixed, sample_s=each, update_s=float(np.median([part['update'] for part in parts])),
                 n_bytes=n_bytes, input_s=input_each,
                 host_s=input_fixed + float(np.median([part['dispatch'] for part in parts])),
                 launch_s=min(block.phases.get('launch', 0.0) for block in blocks),
                 reduce_bytes_per_s=reduce_bytes_per_s)


class Findings:
    """All blocks of a measurement, and the tables, costs and predictions derived from them.

    Parameters
    ----------
    blocks : dict of (kind, n, batch) to list of Block
        One a round.
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

    def __init__(self, blocks, batch_size, n_bytes, sharing, link=MEMORY, updates_on='device', in_half=False,
                 overlaps=False):
        self.blocks, self.batch_size, self.n_bytes = blocks, batch_size, n_bytes
        self.sharing, self.link, self.updates_on, self.in_half = sharing, link, updates_on, in_half
        self.overlaps = overlaps
        self.rounds = len(next(iter(blocks.values())))

    def median(self, kind, n, batch=None):
        """The median Block."""
        return median_block(self.blocks[kind, n, batch or self.batch_size])

    def rows(self):
        """The rows of the table: a dict for plain Keras, for each number of contexts and of ranks."""
        rows = []
        for (kind, n, batch), blocks in self.blocks.items():
            if kind == 'apart' or batch != self.batch_size:
                continue
            block, base = median_block(blocks), self.median('contexts' if kind == 'plain' else kind, 1)
            seconds = [each.seconds for each in blocks]
            rows.append(dict(kind=kind, n=n, samples_per_s=batch / block.seconds, seconds=block.seconds,
                             lowest=min(seconds), highest=max(seconds), speedup=base.seconds / block.seconds,
                             efficiency=base.seconds / block.seconds / n, phases=block.phases,
                             parts=parts_of(block), figures=block.figures, rounds=seconds))
        return sorted(rows, key=lambda row: (['plain', 'contexts', 'ranks'].index(row['kind']), row['n']))

    def costs(self, figures=None):
        """Costs of one context of this process, from the medians."""
        return self._costs('contexts', 1, median_block, figures or {})

    def _costs(self, kind, n, choose, figures):
        from ...program.buckets import most_buckets  # not above: it imports Theano, which commands do not wait for
        blocks = [choose(each) for key, each in self.blocks.items() if key[:2] == (kind, n)]
        costs = costs_of(blocks, self.n_bytes, figures.get('reduce_bytes_per_s', float('inf')))
        return costs._replace(divides_update=self.updates_on == 'sharded',
                              pieces=most_buckets(self.n_bytes) if self.overlaps else 1)

    def here(self, costs, n):
        """Costs of a context among n of this process."""
        once = self.updates_on == 'host'
        return costs._replace(update_s=costs.update_s / self.sharing[n - 1]) if once else costs

    def checks(self):
        """Compare the model with the measurement, for each number of contexts and of ranks above 1.

        Each round is predicted from its own measurements, so that a slow period of the machine affects both sides; the
        error is the median over the rounds.

        Returns
        -------
        list of dict
            kind, n; predicted and measured, seconds; error, predicted / measured - 1; parts, seconds predicted.
        """
        found = []
        for kind, n, batch in sorted(self.blocks):
            if kind not in ('contexts', 'ranks') or n == 1 or batch != self.batch_size:
                continue
            rounds = [(self.predicted(kind, n, lambda blocks, i=i: blocks[i]), self.blocks[kind, n, batch][i].seconds)
                      for i in range(self.rounds)]
            error = float(np.median([sum(parts.values()) / measured for parts, measured in rounds])) - 1
            measured = float(np.median([measured for _, measured in rounds]))
            found.append(dict(kind=kind, n=n, predicted=measured * (1 + error), measured=measured, error=error,
                              parts=self.predicted(kind, n, median_block)))
        return found

    def predicted(self, kind, n, choose=median_block):
        """Parts of the step of n contexts here, or of n ranks, predicted from measurements of one.

        Parameters
        ----------
        choose : callable
            Takes a list of Blocks and returns one.
        """
        figures = choose(self.blocks[kind, n, self.batch_size]).figures
        if kind == 'contexts':
            costs = self.here(self._costs('contexts', 1, choose, figures), n)
            network = Network(self.link, None, EVERY_DEVICE)
            return step_parts(costs, n, self.batch_size, network, sharing=self.sharing[n - 1])
        costs = self._costs('apart', n, choose, figures)
        between = Link('between ranks', figures['latency_s'], figures['bytes_per_s'])
        network = Network(MEMORY, between, 1)
        return step_parts(costs, n, self.batch_size, in_half(network) if self.in_half else network)


def predictions(costs, batch_size, networks, numbers=NUMBERS):
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
    found = []
    for name, network in networks.items():
        for scheme in SCHEMES:
            for weak in (False, True):
                for n in numbers:
                    parts = step_parts(costs, n, batch_size * (n if weak else 1), network, scheme)
                    gain = speedup(costs, n, batch_size, network, scheme, weak=weak)
                    found.append(dict(network=name, scheme=scheme, scaling='weak' if weak else 'strong', devices=n,
                                      seconds=sum(parts.values()), speedup=gain, efficiency=gain / n,
                                      limit=limit(parts), parts=parts,
                                      batch_that_pays=batch_that_pays(costs, n, network, scheme)))
    return found


def outlook(costs, batch_size, network, scheme='host'):
    """The largest numbers of devices that pay on a network, with strong and with weak scaling."""
    strong, weak = [most_devices_that_pay(costs, batch_size, network, scheme, weak, NUMBERS) for weak in (False, True)]
    return dict(scheme=scheme, strong=strong, weak=weak, efficiency=PAYS)
