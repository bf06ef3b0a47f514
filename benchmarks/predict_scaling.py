#!/usr/bin/env python
"""Scaling of a model, measured as by `theano-mgpu bench` and predicted for more devices and other links.

The model trains on 1 to N contexts and, with --ranks, on 1 to N processes, which take turns. Then the answers: whether
it scales here, what limits a step (input, dispatch, compute, exchange or update), and from which batch size on N
devices pay: their efficiency, speedup / N, is then at least 70 %. The prediction for 2 to 1024 devices comes from a
cost model (described in benchmarks/cost_model.py): the measured costs of a step, on devices that share no hardware, and
the latency and bandwidth of --link. Its columns are three ways to add gradients: through the host; a ring of all
devices, as by NCCL, between CUDA devices, or with mgpu.logical_shards by blocks; hierarchical, within a host, then
between hosts. The answer, and the cells marked *, are of the one that the plan of a step chooses for such devices.
Measurement and prediction follow the flags mgpu.update_on, mgpu.collectives, mgpu.logical_shards and
mgpu.overlap, which is predicted to hide as much as it can; of a placed model, only the measurement does.
docs/guide/predicted.md compares predictions with published speeds.

A link is one of
LINKS
or MICROSECONDS:GIGABYTES_PER_SECOND. With NVLink, transfers through the host use PCIe.

Examples:

  python benchmarks/predict_scaling.py --model cnn --gpus 4 --batch-size 512 --plot cnn.png
  python benchmarks/predict_scaling.py --model mlp --ranks 2 --json mlp.json
  python benchmarks/predict_scaling.py --model my_model.h5 --link pcie4+100gbe --link 5:50+20:3 --devices-per-host 4
  python benchmarks/predict_scaling.py --model resnet50 --input-shape 96 96 3 --batch-size 32 --scaling weak
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, Sequence

import theano_mgpu
from theano_mgpu.cli.bench import CORES, add_options, check, describe_setting, prepare
from theano_mgpu.cli.bench.measure import Trainee, take_turns
from theano_mgpu.cli.bench.synthetic_models import Recipe
from theano_mgpu.cli.job_command import THREADS
from theano_mgpu.cli.output import note
from theano_mgpu.cli.shared_arguments import positive
from theano_mgpu.devices.context_map import Context
from theano_mgpu.errors import MgpuError
from theano_mgpu.options import Options
from theano_mgpu.utils import progress
from theano_mgpu.utils.files import check_folder, whole_file, whole_text
from theano_mgpu.utils.tables import bytes_text, counted, table

import theano
from cost_model import (
    LINKS,
    MEMORY,
    NUMBERS,
    PAYS,
    SCHEMES,
    CostModel,
    Network,
    Row,
    limit,
    parse_network,
    predictions,
)
from measured_costs import (
    Block,
    Findings,
    Key,
    bytes_of_gradients,
    copy_rate,
    link_to,
    most_sharing,
    planned_schemes,
    reduce_rate,
    scheme_of,
)
from worker import Worker

WIDTH = 118  # characters in a line of the answer
PACKAGES = str(Path(theano_mgpu.__file__).resolve().parents[1])
RANK = str(Path(__file__).resolve().with_name('predict_scaling_ranks.py'))
REMEDIES = {
    'compute': 'more devices shorten that',
    'dispatch': 'each step has this cost whatever its size; a larger batch spreads it over more samples',
    'exchange': 'a larger batch spreads the exchange over more samples',
    'update': 'each device updates all parameters; mgpu.update_on=sharded divides that among them, and a larger '
              'batch spreads it over more samples',
    'input': 'give samples that are float32 already, or use --sharded ranks that read their own samples',
}
SUMS = {'host': 'through the host', 'ring': 'by NCCL', 'blocks': 'by NCCL'}  # of gradients, as they are added here
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


def answer_of(findings: Findings, rows: Sequence[Row], networks: dict[str, Network], predicted: dict[Any, Row]
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
    return sentences + predicted_answer(findings.batch_size, networks, predicted)


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


def predicted_answer(batch_size: int, networks: dict[str, Network], predicted: dict[Any, Row]) -> list[str]:
    """Return a sentence on devices like the measured one over each network, each with hardware of its own.

    Gradients are added as the plan of a step chooses.
    """
    sentences = []
    for name, network in networks.items():
        planned = {(scaling, n): row for (net, _, scaling, n), row in predicted.items()
                   if net == name and row['planned']}
        eight = planned['strong', 8]
        most = [max((n for n in NUMBERS if planned[scaling, n]['efficiency'] >= PAYS), default=1)
                for scaling in ('strong', 'weak')]
        strong, weak = ({1: 'no number of them pays', 1024: 'all 1,024 pay'}.get(n, 'up to %d pay' % n) for n in most)
        batch = eight['batch_that_pays']
        sentences.append(
            'Over %s, 8 such devices would be %.1f times as fast as one at batch %s, with sums %s, limited by %s. They '
            'pay %s. With the same whole batch, %s; with %s for each device, %s.'
            % (network.name, eight['speedup'], format(batch_size, ','), SUMS[eight['scheme']], eight['limit'],
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
        lines.append([str(n)] + ['%.1f %s%s' % (cell['speedup'], cell['limit'], ' *' * cell['planned'])
                                 for cell in cells])
    return table(lines, {0})


def costs_line(model: CostModel, copy_bytes_per_s: float) -> str:
    """Return a sentence on the measured costs."""
    link = model.network.inner
    return ('One device takes %.3f ms a step, %.2f us a sample and %.3f ms for the update; the host takes %.3f ms a '
            'step. The gradients have %s; the host adds them at %.1f GB/s (it copies memory at %.1f GB/s)%s.'
            % (1e3 * model.fixed_s, 1e6 * model.sample_s, 1e3 * model.update_s, 1e3 * model.host_s,
               bytes_text(int(model.n_bytes)), model.reduce_bytes_per_s / 1e9, copy_bytes_per_s / 1e9,
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


def start_ranks(n: int, threads: int, settings: dict[str, Any]) -> Worker:
    """Start n ranks with some threads each, which print ``ready``; predict_scaling_ranks.py names the settings."""
    environment = dict({name: str(threads) for name in THREADS}, **os.environ)
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, [PACKAGES, os.environ.get('PYTHONPATH')]))
    return Worker('a job of %s' % counted(n, 'rank'), [
        sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n), '--gpus-per-process', '1', RANK,
        json.dumps(settings)], environment)


def turn_of_ranks(ranks: Worker) -> list[Block]:
    """Run each measurement of the ranks once; return the Blocks."""
    ranks.send('go')
    return [Block(**entries) for entries in json.loads(ranks.answer(lambda line: line.startswith('[')))]


def turn(trainee: Trainee, kind: str, n: int, batch: int, n_steps: int) -> list[Block]:
    """Train for `n_steps` steps, and let the host add gradients of several contexts; return the Block."""
    measured = trainee.block(n_steps)
    figures = {'reduce_bytes_per_s': reduce_rate(bytes_of_gradients(trainee.model), n)} \
        if kind == 'contexts' and n > 1 else {}
    return [Block(kind, n, batch, *measured, figures)]


def measure(args: argparse.Namespace, recipe: Recipe, contexts: Sequence[Context]) -> Findings:
    """Measure plain Keras, one context at several batch sizes, more contexts, and ranks, in turns; return Findings."""
    names, batch_size, steps = [context.name for context in contexts], args.batch_size, args.steps
    sizes = sorted({-(-batch_size // n) for n in (1, 2, 4, len(names))}, reverse=True)
    contestants: dict[Any, Callable[[], list[Block]]] = {}
    for n in range(contexts[0].kind != 'cpu', len(names) + 1):
        note('compiling for %s' % (counted(n, 'context') if n else 'plain Keras'))
        model = recipe.replicate(names[:n]) if n else recipe.build()
        for size in sizes if n == 1 else [batch_size]:
            trainee = Trainee(model, recipe, size)
            steps = steps or trainee.steps_in_block()
            contestants[n, size] = functools.partial(turn, trainee, 'contexts' if n else 'plain', n or 1, size, steps)
    with contextlib.ExitStack() as stack:
        for n in range(1, (args.ranks or 0) + 1):
            note('starting %s' % counted(n, 'rank'))
            ranks = stack.enter_context(start_ranks(n, max(1, CORES // args.ranks), dict(
                model=recipe.name, input_shape=recipe.input_shape, optimizer=recipe.optimizer, batch_size=batch_size,
                sizes=[-(-batch_size // n), 2 * -(-batch_size // n)], steps=steps)))
            ranks.answer('ready'.__eq__)
            contestants['ranks', n] = functools.partial(turn_of_ranks, ranks)
        with progress.bar(args.rounds * len(contestants), sys.stderr.isatty()) as bar:
            turns = take_turns(contestants, args.rounds, bar)
    rounds: list[dict[Key, Block]] = [{block[:3]: block for blocks in of_round for block in blocks}
                                      for of_round in zip(*turns.values())]
    flags, n_bytes, step = theano.config.mgpu, bytes_of_gradients(model), model.train_function.function.step
    return Findings(rounds, batch_size, n_bytes, [most_sharing(contexts[:n + 1]) for n in range(len(contexts))],
                    link_to(contexts[0], n_bytes), Options().updates_on(contexts)[0],
                    step.plan.overlaps, scheme_of(step.plan),
                    planned_schemes(step), trainee.fits, int(flags.logical_shards))


def show(args: argparse.Namespace, setting: dict[str, Any], findings: Findings, networks: dict[str, Network]) -> None:
    """Print the tables and the answer; write --json and draw --plot."""
    host = dict(copy_bytes_per_s=copy_rate(), reduce_bytes_per_s=reduce_rate(findings.n_bytes, 2))
    rows = findings.rows()
    model = findings.model(findings.medians)._replace(reduce_bytes_per_s=host['reduce_bytes_per_s'])
    predicted = predictions(model, args.batch_size, networks, findings.planned)
    answer = answer_of(findings, rows, networks, predicted)
    print('\nmedians of %s in turns; speedup over 1 context, or 1 rank, with the same whole batch\n%s\n\n%s\n'
          % (counted(args.rounds, 'round'), scaling_table(rows), phase_table(rows)))
    for sentence in [*answer, costs_line(model, host['copy_bytes_per_s'])]:
        print(textwrap.fill(sentence, WIDTH, initial_indent='- ', subsequent_indent='  '))
    print('\npredicted speedup and what limits it, %s scaling: devices that share no hardware, %d on a host; *: as '
          'planned\n%s'
          % (args.scaling, args.devices_per_host, prediction_table(predicted, networks, args.scaling)))
    if args.json:
        figures = dict(setting, rows=rows, checks=[row['check'] for row in rows if row['n'] > 1],
                       costs=model._asdict(), host=host, link=findings.link._asdict(), n_bytes=findings.n_bytes,
                       predictions=list(predicted.values()), answer=answer, blocks=[
                           block._asdict() for blocks in findings.rounds for block in blocks.values()])
        with whole_text(args.json) as file:  # infinity, which JSON cannot express, becomes null
            json.dump(json.loads(json.dumps(figures), parse_constant=lambda _: None), file, indent=1)
    if args.plot:
        title = '%s, batch %d, %s scaling predicted\n%s' % (
            os.path.basename(args.model), args.batch_size, args.scaling, setting['machine'])
        draw(args.plot, title, rows, predicted, networks, args.scaling)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    links = ['  %-10s %-16s %3.0f us %7.2f GB/s' % (name, link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)
             for name, link in LINKS.items()]
    parser = argparse.ArgumentParser(description=(__doc__ or '').replace('LINKS', '\n'.join(links)),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add = parser.add_argument
    add('--plot', metavar='FILE.png', help='draw speedup against ideal')
    add('--link', action='append', metavar='INNER+OUTER', dest='links', help='links within a host and between hosts; '
        'may be repeated (default: pcie4+10gbe and nvlink3+100gbe)')
    add('--devices-per-host', type=positive, default=8, metavar='D', help='(default: %(default)s)')
    add('--scaling', choices=('strong', 'weak'), default='strong', help='with strong, the whole batch keeps its size; '
        'with weak, the batch of each device does (default: %(default)s)')
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    try:
        networks = {text: parse_network(text, args.devices_per_host)
                    for text in args.links or ['pcie4+10gbe', 'nvlink3+100gbe']}
        check(args)
        if args.plot:
            check_folder(args.plot)
        recipe, contexts = prepare(args)
        if args.batch_size < 2:
            parser.error('--batch-size 1: steps are timed on the whole batch and on its half; give 2 or more')
        setting = describe_setting(args, recipe, contexts)
        findings = measure(args, recipe, contexts)
    except MgpuError as error:
        parser.error(str(error))
    show(args, setting, findings, networks)


if __name__ == '__main__':
    main()
