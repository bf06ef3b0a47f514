"""What `theano-mgpu bench` prints: the table, the phases of a step, the answer, the prediction."""
from ...utils.tables import counted, table
from ..output import human_bytes
from .costs import NUMBERS, outlook
from .links import EVERY_DEVICE, MEMORY, Network
from .scaling import PAYS, batch_that_pays, limit, speedup

SCHEME_TITLES = {'host': 'through the host', 'ring': 'ring', 'hierarchical': 'hierarchical'}
REMEDIES = {
    'compute': 'more devices shorten that',
    'dispatch': 'each step has this cost whatever its size; a larger batch spreads it over more samples',
    'exchange': 'a larger batch spreads the exchange over more samples',
    'update': 'each device updates all parameters; mgpu.update_on=sharded divides that among them, and a larger '
              'batch spreads it over more samples',
    'input': 'give samples that are float32 already, or use --sharded ranks that read their own samples',
}

UPDATES = {'device': 'each does the whole update', 'sharded': 'each does a part of the update',
           'host': 'one update serves all'}


def label(row):
    """The title of a row."""
    return 'plain Keras' if row['kind'] == 'plain' else counted(row['n'], row['kind'][:-1])


def scaling_table(rows):
    """Samples a second, seconds a step and speedup, as text."""
    lines = [['', 'samples/s', 's/step', 'lowest', 'highest', 'speedup', 'ideal', 'efficiency']]
    for row in rows:
        lines.append([label(row), '{:,.0f}'.format(row['samples_per_s'])]
                     + ['%.4f' % row[name] for name in ('seconds', 'lowest', 'highest')]
                     + ['%.2f' % row['speedup'], '%d' % row['n'], '%.0f %%' % (100 * row['efficiency'])])
    return table(lines, set(range(1, 8)))


def phase_table(rows):
    """Milliseconds a step in each phase, as text."""
    rows = [row for row in rows if row['phases']]
    names = list(max((row['phases'] for row in rows), key=len))
    names += [name for row in rows for name in row['phases'] if name not in names]
    lines = [['ms a step'] + list(dict.fromkeys(names)) + ['other']]
    for row in rows:
        other = max(0.0, row['seconds'] - sum(row['phases'].values()))
        lines.append([label(row)] + ['%.2f' % (1e3 * row['phases'][name]) if name in row['phases'] else '-'
                                     for name in lines[0][1:-1]] + ['%.2f' % (1e3 * other)])
    return table(lines, set(range(1, len(lines[0]))))


def measured_answer(findings, rows, checks):
    """Sentences on the measured devices: their gain, what limits them, and the error of the model."""
    sentences = []
    for kind in ('contexts', 'ranks'):
        several = [row for row in rows if row['kind'] == kind and row['n'] > 1]
        if several:
            row = several[-1]
            check = next(each for each in checks if (each['kind'], each['n']) == (kind, row['n']))
            sentences += [verdict(row), measured_limit(findings, row),
                          'From %s the model predicts %.4f s a step for %s, %.0f %% %s than the %.4f s measured.'
                          % ('1 context' if kind == 'contexts' else 'ranks that do not exchange', check['predicted'],
                             label(row), abs(100 * check['error']), 'more' if check['error'] > 0 else 'less',
                             check['measured'])]
    if not sentences:
        sentences.append('Only one context was measured, so the model was not checked: map more (theano-mgpu config '
                         '-n 2), or start several processes (--ranks 2).')
    return sentences


def verdict(row):
    """Whether the model scales here."""
    gain = ('%s process %s samples a second, %.2f times as many as 1 (%.0f %% of ideal)'
            % (label(row), '{:,.0f}'.format(row['samples_per_s']), row['speedup'], 100 * row['efficiency']))
    if row['efficiency'] >= PAYS:
        return 'It scales here: %s.' % gain
    if row['speedup'] > 1.02:
        return 'It scales here, but poorly: %s.' % gain
    return 'It does not scale here: %s.' % gain


def measured_limit(findings, row):
    """A sentence on what limits a row."""
    part, total = limit(row['parts']), sum(row['parts'].values())
    text = 'What limits %s is %s, %.0f %% of a step' % (label(row), part, 100 * row['parts'][part] / total)
    if row['kind'] == 'contexts' and findings.sharing[row['n'] - 1] > 1 and part in ('compute', 'update', 'dispatch'):
        updates = UPDATES[findings.updates_on]
        return text + (': %d of them share one piece of hardware, so that together they compute as long as one does, '
                       'and %s. Processes can compute at the same time (--ranks %d).'
                       % (findings.sharing[row['n'] - 1], updates, row['n']))
    return text + ': %s.' % REMEDIES[part]


def batch_answer(findings, costs):
    """A sentence on the batch size from which the present devices pay."""
    n = len(findings.sharing)
    if n == 1:
        return []
    network = Network(findings.link, None, EVERY_DEVICE)
    figures = findings.median('contexts', n).figures
    batch = batch_that_pays(findings.here(costs._replace(**figures), n), n, network, sharing=findings.sharing[-1])
    asked = 'an efficiency of %.0f %%, speedup / devices' % (100 * PAYS)
    if batch is None:
        return ['%s do not pay here (%s) at any batch size.' % (counted(n, 'context'), asked)]
    return ['%s pay here (%s) from a batch of %s on.' % (counted(n, 'context'), asked, counted(batch, 'sample'))]


def predicted_answer(costs, batch_size, networks, predicted):
    """Sentences on devices like the measured one, each with hardware of its own."""
    sentences = []
    for name, network in networks.items():
        reach = outlook(costs, batch_size, network)
        eight = next(each for each in predicted if each['network'] == name and each['scheme'] == 'host'
                     and each['scaling'] == 'strong' and each['devices'] == 8)
        batch = eight['batch_that_pays']
        sentences.append(
            'Over %s, 8 such devices would be %.1f times as fast as one at batch %s, limited by %s. They pay %s. '
            'With the same whole batch, %s; with %s for each device, %s.'
            % (network.name, eight['speedup'], format(batch_size, ','), eight['limit'],
               'at no batch size' if batch is None else 'from batch %s on' % format(batch, ','), up_to(reach['strong']),
               counted(batch_size, 'sample'), up_to(reach['weak'])))
    return sentences


def up_to(n):
    """The numbers of devices that pay, as text.

    Examples
    --------
    >>> up_to(1), up_to(16)
    ('no number of them pays', 'up to 16 pay')
    """
    if n == 1:
        return 'no number of them pays'
    return '%s %s pay' % ('all' if n == NUMBERS[-1] else 'up to', format(n, ','))


def prediction_table(predicted, networks, scaling):
    """Speedups of 2 to 1024 devices over each network with each scheme, as text."""
    columns = [(name, scheme) for name in networks for scheme in SCHEME_TITLES]
    lines = [['devices'] + [name if scheme == 'host' else '' for name, scheme in columns],
             [''] + [SCHEME_TITLES[scheme] for _, scheme in columns]]
    found = {(each['network'], each['scheme'], each['devices']): each for each in predicted
             if each['scaling'] == scaling}
    for n in NUMBERS:
        cells = [found[name, scheme, n] for name, scheme in columns]
        lines.append([str(n)] + ['%.1f %s' % (cell['speedup'], cell['limit']) for cell in cells])
    return table(lines, {0})


def costs_line(costs, link, copy_bytes_per_s):
    """A sentence on the measured costs."""
    text = ('One device takes %.3f ms a step, %.2f us a sample and %.3f ms for the update; the host takes %.3f ms a '
            'step. The gradients have %s; the host adds them at %.1f GB/s (it copies memory at %.1f GB/s)'
            % (1e3 * costs.fixed_s, 1e6 * costs.sample_s, 1e3 * costs.update_s, 1e3 * costs.host_s,
               human_bytes(costs.n_bytes), costs.reduce_bytes_per_s / 1e9, copy_bytes_per_s / 1e9))
    if link is not MEMORY:
        text += '; %s: %.0f us, %.1f GB/s' % (link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)
    return text + '.'


def measured_speedups(rows, kind):
    """Numbers and speedups of the rows of a kind."""
    return [(row['n'], row['speedup']) for row in rows if row['kind'] == kind]


def curve(costs, batch_size, network, scheme, weak, numbers):
    """Predicted speedups, one a number of devices."""
    return [speedup(costs, n, batch_size, network, scheme, weak=weak) for n in numbers]
