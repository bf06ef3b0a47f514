"""The answers of `theano-mgpu bench`: tables, sentences and a picture."""
from __future__ import annotations

from typing import Any, Sequence

from ...utils.files import whole_file
from ...utils.tables import counted, table
from ..output import human_bytes
from .scaling import MEMORY, NUMBERS, PAYS, SCHEMES, CostModel, Findings, Network, Row, limit

REMEDIES = {
    'compute': 'more devices shorten that',
    'dispatch': 'each step has this cost whatever its size; a larger batch spreads it over more samples',
    'exchange': 'a larger batch spreads the exchange over more samples',
    'update': 'each device updates all parameters; mgpu.update_on=sharded divides that among them, and a larger '
              'batch spreads it over more samples',
    'input': 'give samples that are float32 already, or use --sharded ranks that read their own samples',
}
SUMS = {'host': 'through the host', 'ring': 'by NCCL', 'gather': 'by NCCL'}  # of gradients, as they are added here
UPDATES = {'device': 'each does the whole update', 'sharded': 'each does a part of the update',
           'host': 'one update serves all'}


def label(row: Row) -> str:
    """Return the title of a row."""
    return 'plain Keras' if row['kind'] == 'plain' else counted(row['n'], row['kind'][:-1])


def scaling_table(rows: Sequence[Row]) -> str:
    """Return samples a second, seconds a step and speedup, as text."""
    lines = [['', 'samples/s', 's/step', 'lowest', 'highest', 'speedup', 'ideal', 'efficiency']]
    for row in rows:
        cells = '{samples_per_s:,.0f} {seconds:.4f} {lowest:.4f} {highest:.4f} {speedup:.2f} {n}'.format(**row)
        lines.append([label(row), *cells.split(), '%.0f %%' % (100 * row['efficiency'])])
    return table(lines, set(range(1, 8)))


def phase_table(rows: Sequence[Row]) -> str:
    """Return the milliseconds a step in each phase, as text; plain Keras has no phases."""
    phases = {label(row): row['phases'] for row in rows if row['kind'] != 'plain'}
    names = max(phases.values(), key=len)  # ranks have all phases of contexts, and more
    lines = [['ms a step', *names]]
    lines += [[title, *('%.2f' % (1e3 * seconds[name]) if name in seconds else '-' for name in names)]
              for title, seconds in phases.items()]
    return table(lines, set(range(1, len(names) + 1)))


def answer(findings: Findings, rows: Sequence[Row], networks: dict[str, Network], predicted: dict[Any, Row]
           ) -> list[str]:
    """Return all sentences on the measured devices and on more devices like them."""
    sentences = []
    for row in {row['kind']: row for row in rows if row['n'] > 1}.values():  # the most contexts, and the most ranks
        check = row['check']
        scales = ('It scales here' if row['efficiency'] >= PAYS else
                  'It scales here, but poorly' if row['speedup'] > 1.02 else 'It does not scale here')
        sentences += [
            '%s: %s process %s samples a second, %.2f times as many as 1 (%.0f %% of ideal).' % (
                scales, label(row), format(row['samples_per_s'], ',.0f'), row['speedup'], 100 * row['efficiency']),
            measured_limit(findings, row),
            'From %s the model predicts %.4f s a step for %s, %.0f %% %s than the %.4f s measured.' % (
                '1 context' if row['kind'] == 'contexts' else 'ranks that do not exchange', check['predicted'],
                label(row), abs(100 * check['error']), 'more' if check['error'] > 0 else 'less', check['measured'])]
    if not sentences:
        sentences.append('Only one context was measured, so the model was not checked: map more (theano-mgpu config '
                         '-n 2), or start several processes (--ranks 2).')
    n = len(findings.sharing)
    if n > 1:
        batch = findings.model(findings.medians, n=n).batch_that_pays(n)
        pay, when = (('do not pay', 'at any batch size') if batch is None else
                     ('pay', 'from a batch of %s on' % counted(batch, 'sample')))
        sentences.append('%s %s here (an efficiency of %.0f %%, speedup / devices) %s.'
                         % (counted(n, 'context'), pay, 100 * PAYS, when))
    sentences += [findings.fits] if findings.fits else []
    return sentences + predicted_answer(findings.batch_size, networks, predicted, findings.scheme)


def measured_limit(findings: Findings, row: Row) -> str:
    """Return a sentence on the part that limits a row."""
    part = limit(row['parts'])
    sharing = findings.sharing[row['n'] - 1] if row['kind'] == 'contexts' else 1
    remedy = REMEDIES[part] + '.'
    if sharing > 1 and part in ('compute', 'update', 'dispatch'):
        remedy = ('%d of them share one piece of hardware, so that together they compute as long as one does, and %s. '
                  'Processes can compute at the same time (--ranks %d).'
                  % (sharing, UPDATES[findings.updates_on], row['n']))
    return 'What limits %s is %s, %.0f %% of a step: %s' % (
        label(row), part, 100 * row['parts'][part] / sum(row['parts'].values()), remedy)


def predicted_answer(batch_size: int, networks: dict[str, Network], predicted: dict[Any, Row], scheme: str = 'host'
                     ) -> list[str]:
    """Return a sentence on devices like the measured one over each network, each with hardware of its own.

    `scheme` is the way in which gradients are added here.
    """
    sentences = []
    for name, network in networks.items():
        eight = predicted[name, scheme, 'strong', 8]
        most = [max((n for n in NUMBERS if predicted[name, scheme, scaling, n]['efficiency'] >= PAYS), default=1)
                for scaling in ('strong', 'weak')]
        strong, weak = ({1: 'no number of them pays', 1024: 'all 1,024 pay'}.get(n, 'up to %d pay' % n) for n in most)
        batch = eight['batch_that_pays']
        sentences.append(
            'Over %s, 8 such devices would be %.1f times as fast as one at batch %s, with sums %s, limited by %s. They '
            'pay %s. With the same whole batch, %s; with %s for each device, %s.'
            % (network.name, eight['speedup'], format(batch_size, ','), SUMS[scheme], eight['limit'],
               'at no batch size' if batch is None else 'from batch %s on' % format(batch, ','), strong,
               counted(batch_size, 'sample'), weak))
    return sentences


def prediction_table(predicted: dict[Any, Row], networks: dict[str, Network], scaling: str) -> str:
    """Return speedups of 2 to 1024 devices over each network with each scheme, as text."""
    schemes = list(dict.fromkeys(scheme for _, scheme, *_ in predicted))
    lines = [['devices'] + [text for name in networks for text in (name, '', '')],
             [''] + [SCHEMES[scheme] for scheme in schemes] * len(networks)]
    for n in NUMBERS:
        cells = [predicted[name, scheme, scaling, n] for name in networks for scheme in schemes]
        lines.append([str(n)] + ['%.1f %s' % (cell['speedup'], cell['limit']) for cell in cells])
    return table(lines, {0})


def costs_line(model: CostModel, copy_bytes_per_s: float) -> str:
    """Return a sentence on the measured costs."""
    link = model.network.inner
    return ('One device takes %.3f ms a step, %.2f us a sample and %.3f ms for the update; the host takes %.3f ms a '
            'step. The gradients have %s; the host adds them at %.1f GB/s (it copies memory at %.1f GB/s)%s.'
            % (1e3 * model.fixed_s, 1e6 * model.sample_s, 1e3 * model.update_s, 1e3 * model.host_s,
               human_bytes(int(model.n_bytes)), model.reduce_bytes_per_s / 1e9, copy_bytes_per_s / 1e9,
               '' if link is MEMORY else '; %s: %.0f us, %.1f GB/s' % (
                   link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)))


def draw(path: str, title: str, rows: Sequence[Row], predicted: dict[Any, Row], networks: dict[str, Network],
         scaling: str) -> None:
    """Draw measured points, predicted curves of strong or weak scaling, and the ideal, as a PNG."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    numbers = [1, *NUMBERS]
    figure, axis = plt.subplots(figsize=(9.5, 5.2), constrained_layout=True)
    axis.loglog(numbers, numbers, base=2, color='grey', linewidth=1, label='ideal')
    for number, (name, network) in enumerate(networks.items()):
        for style, scheme in zip(('-', '--', ':'), dict.fromkeys(key[1] for key in predicted)):
            axis.plot(NUMBERS, [predicted[name, scheme, scaling, n]['speedup'] for n in NUMBERS], style,
                      color='C%d' % number, label='predicted: %s, %s' % (network.name, SCHEMES[scheme]))
    for kind, style, legend in ('contexts', 'ok', 'contexts of a process'), ('ranks', 'sr', 'ranks, one context each'):
        points = [(row['n'], row['speedup']) for row in rows if row['kind'] == kind]
        if points:
            axis.plot(*zip(*points), style, markersize=7, label='measured: ' + legend, zorder=5)
    lowest = min(0.6, *(row['speedup'] for row in rows))
    axis.set(xlabel='devices', ylabel='speedup over one device', xticks=numbers,
             yticks=[0.5, *numbers], ylim=(0.8 * lowest, 1.2 * NUMBERS[-1]))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter('{x:g}')
    axis.yaxis.set_major_formatter('{x:g}')
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10)
    axis.legend(loc='upper left', bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False, fontsize=8)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')
    plt.close(figure)
