"""What `theano-mgpu bench` prints: the table, the phases of a step, the answer, the prediction."""
from ...utils.tables import counted, table
from ..output import human_bytes
from .costs import NUMBERS
from .links import MEMORY
from .scaling import PAYS, batch_that_pays, limit

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
    """Return the title of a row."""
    return 'plain Keras' if row['kind'] == 'plain' else counted(row['n'], row['kind'][:-1])


def scaling_table(rows):
    """Return samples a second, seconds a step and speedup, as text."""
    lines = [['', 'samples/s', 's/step', 'lowest', 'highest', 'speedup', 'ideal', 'efficiency']]
    for row in rows:
        cells = '{samples_per_s:,.0f} {seconds:.4f} {lowest:.4f} {highest:.4f} {speedup:.2f} {n}'.format(**row)
        lines.append([label(row), *cells.split(), '%.0f %%' % (100 * row['efficiency'])])
    return table(lines, set(range(1, 8)))


def phase_table(rows):
    """Return the milliseconds a step in each phase, as text."""
    rows = [row for row in rows if row['phases']]
    longest_first = [max((row['phases'] for row in rows), key=len)] + [row['phases'] for row in rows]
    names = list(dict.fromkeys(name for phases in longest_first for name in phases))
    lines = [['ms a step', *names, 'other']]
    for row in rows:
        milliseconds = {name: '%.2f' % (1e3 * seconds) for name, seconds in row['phases'].items()}
        other = max(0.0, row['seconds'] - sum(row['phases'].values()))
        lines.append([label(row), *(milliseconds.get(name, '-') for name in names), '%.2f' % (1e3 * other)])
    return table(lines, set(range(1, len(lines[0]))))


def measured_answer(findings, rows, checks):
    """Return sentences on the measured devices: their gain, what limits them, and the error of the model."""
    sentences = []
    last = {row['kind']: row for row in rows if row['n'] > 1}
    for kind, row in last.items():
        check = next(each for each in checks if (each['kind'], each['n']) == (kind, row['n']))
        sentences += [verdict(row), measured_limit(findings, row),
                      'From %s the model predicts %.4f s a step for %s, %.0f %% %s than the %.4f s measured.'
                      % ('1 context' if kind == 'contexts' else 'ranks that do not exchange', check['predicted'],
                         label(row), abs(100 * check['error']), 'more' if check['error'] > 0 else 'less',
                         check['measured'])]
    return sentences or ['Only one context was measured, so the model was not checked: map more (theano-mgpu config '
                         '-n 2), or start several processes (--ranks 2).']


def verdict(row):
    """Return whether the model scales here, as a sentence."""
    scales = ('It scales here' if row['efficiency'] >= PAYS else
              'It scales here, but poorly' if row['speedup'] > 1.02 else 'It does not scale here')
    return ('%s: %s process %s samples a second, %.2f times as many as 1 (%.0f %% of ideal).'
            % (scales, label(row), format(row['samples_per_s'], ',.0f'), row['speedup'], 100 * row['efficiency']))


def measured_limit(findings, row):
    """Return a sentence on what limits a row."""
    part, total = limit(row['parts']), sum(row['parts'].values())
    text = 'What limits %s is %s, %.0f %% of a step: ' % (label(row), part, 100 * row['parts'][part] / total)
    sharing = findings.sharing[row['n'] - 1] if row['kind'] == 'contexts' else 1
    if sharing == 1 or part not in ('compute', 'update', 'dispatch'):
        return text + REMEDIES[part] + '.'
    return text + ('%d of them share one piece of hardware, so that together they compute as long as one does, and %s. '
                   'Processes can compute at the same time (--ranks %d).'
                   % (sharing, UPDATES[findings.updates_on], row['n']))


def batch_answer(findings):
    """Return a sentence on the batch size from which the present devices pay; none for a single one."""
    n = len(findings.sharing)
    if n == 1:
        return []
    costs, network, sharing = findings.here(findings.medians, n)
    batch = batch_that_pays(costs, n, network, sharing=sharing)
    text = '%%s (an efficiency of %.0f %%%%, speedup / devices) %%s.' % (100 * PAYS)
    if batch is None:
        return [text % ('%s do not pay here' % counted(n, 'context'), 'at any batch size')]
    return [text % ('%s pay here' % counted(n, 'context'), 'from a batch of %s on' % counted(batch, 'sample'))]


def predicted_answer(batch_size, networks, predicted):
    """Return sentences on devices like the measured one, each with hardware of its own."""
    sentences = []
    for name, network in networks.items():
        through_host = {(each['scaling'], each['devices']): each for each in predicted
                        if (each['network'], each['scheme']) == (name, 'host')}
        strong, weak = [max([1] + [n for n in NUMBERS if through_host[scaling, n]['speedup'] >= PAYS * n])
                        for scaling in ('strong', 'weak')]
        eight = through_host['strong', 8]
        batch = eight['batch_that_pays']
        sentences.append(
            'Over %s, 8 such devices would be %.1f times as fast as one at batch %s, limited by %s. They pay %s. '
            'With the same whole batch, %s; with %s for each device, %s.'
            % (network.name, eight['speedup'], format(batch_size, ','), eight['limit'],
               'at no batch size' if batch is None else 'from batch %s on' % format(batch, ','), up_to(strong),
               counted(batch_size, 'sample'), up_to(weak)))
    return sentences


def up_to(n):
    """Return the numbers of devices that pay, as text.

    Examples
    --------
    >>> up_to(1), up_to(16)
    ('no number of them pays', 'up to 16 pay')
    """
    if n == 1:
        return 'no number of them pays'
    return '%s %s pay' % ('all' if n == NUMBERS[-1] else 'up to', format(n, ','))


def prediction_table(predicted, networks, scaling):
    """Return speedups of 2 to 1024 devices over each network with each scheme, as text."""
    lines = [['devices'] + [text for name in networks for text in (name, '', '')],
             [''] + [title for _ in networks for title in SCHEME_TITLES.values()]]
    for n in NUMBERS:  # predictions are in the order of the columns
        lines.append([str(n)] + ['%.1f %s' % (each['speedup'], each['limit']) for each in predicted
                                 if (each['scaling'], each['devices']) == (scaling, n)])
    return table(lines, {0})


def costs_line(costs, link, copy_bytes_per_s):
    """Return a sentence on the measured costs."""
    text = ('One device takes %.3f ms a step, %.2f us a sample and %.3f ms for the update; the host takes %.3f ms a '
            'step. The gradients have %s; the host adds them at %.1f GB/s (it copies memory at %.1f GB/s)'
            % (1e3 * costs.fixed_s, 1e6 * costs.sample_s, 1e3 * costs.update_s, 1e3 * costs.host_s,
               human_bytes(costs.n_bytes), costs.reduce_bytes_per_s / 1e9, copy_bytes_per_s / 1e9))
    if link is not MEMORY:
        text += '; %s: %.0f us, %.1f GB/s' % (link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)
    return text + '.'
