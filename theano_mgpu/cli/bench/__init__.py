"""`theano-mgpu bench`: how a model scales, measured on 1 to N contexts and ranks, and predicted for more devices.

A model trains on synthetic data on 1, 2, ... N contexts of THEANO_FLAGS or .theanorc (see "theano-mgpu devices"), and
with --ranks on 1, 2, ... N processes; if contexts are CPUs, plain Keras takes part, too. All take turns, a few steps
at a time; figures are medians of the rounds. The whole batch has the same size for all, as in a script that changes
only the number of devices. The phases of a step: scatter (divide the batch) and host_to_device, launch (on GPUs) and
run (until devices have computed), device_to_host (gradients), all_reduce (add them), exchange (other values that all
contexts need, and all values between processes) and wait (for other processes), update and broadcast; other is the
time of Python and Keras.

Then it reports whether the model scales, what limits it, and from which batch size on N devices pay: their efficiency,
speedup / N, is then at least 70 %. On GPUs it also says which batch size fits in their memory. The prediction for 2 to
1024 devices comes from a cost model (described in theano_mgpu/cli/bench/scaling.py): the measured costs of a step, on
devices that share no hardware, and the latency and bandwidth of --link. Its columns are three ways to add gradients:
through the host; a ring of all devices, as by NCCL, between CUDA devices, or with mgpu.logical_shards a gather;
hierarchical, within a host, then between hosts. The answer names the one that runs here. Measurement and prediction
follow the flags mgpu.update_on, mgpu.exchange, mgpu.collectives, mgpu.logical_shards and mgpu.overlap, which is
predicted to hide as much as it can; of a placed model, only the measurement does.

examples:
  theano-mgpu bench --model mlp
  theano-mgpu bench --model cnn --contexts 4 --batch-size 512 --plot cnn.png
  theano-mgpu bench --model mlp --ranks 2 --json mlp.json
  theano-mgpu bench --model my_model.h5 --link pcie4+100gbe --link 5:50+20:3 --devices-per-host 4
  theano-mgpu bench --model resnet50 --input-shape 96 96 3 --batch-size 32 --scaling weak
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import platform
import sys
import textwrap
from typing import Any, Callable, Sequence

import numpy as np

from ...comm import mpi_library
from ...comm.allocation import allocation
from ...devices import discovery
from ...devices.context_map import Context
from ...devices.contexts import init
from ...errors import MgpuError, MissingError
from ...utils import mpi_environment, progress
from ...utils.files import check_folder, check_writable, whole_text
from ...utils.tables import counted
from ..config import devices, positive
from ..job_command import choose_start
from ..output import human_bytes, note, quietly
from . import report
from .measure import Trainee, copy_rate, is_cpu, link_to, most_sharing, reduce_rate, take_turns
from .models import MODELS, Recipe
from .scaling import LINKS, Block, Findings, Network, in_half, parse_network, predictions
from .worker import start_ranks, turn_of_ranks

WIDTH = 118  # characters in a line of the answer
CORES = len(os.sched_getaffinity(0))  # cores that this process may use


def add_parser(sub: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('bench', help='measure how a model scales, and predict',
                            epilog=(__doc__ or '').partition('\n\n')[2],
                            description='Measure how training scales over contexts and ranks, and what limits it.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--model', default='cnn', metavar='NAME|FILE', help='%s, or a file written by keras.Model.save '
        '(default: %%(default)s)' % ', '.join(MODELS))
    add('--contexts', type=devices, metavar='N', help='measure 1 to N (default: all that are mapped)')
    add('--ranks', type=devices, metavar='N', help='measure 1 to N processes, too; needs MPI')
    add('--batch-size', type=positive, metavar='B', help='samples in the whole batch (default: 16 to 128, by model)')
    add('--input-shape', type=positive, nargs='+', metavar='D',
        help="of a sample (default: the model's; vgg16 and resnet50 on CPUs: 64 64 3)")
    add('--optimizer', default='adam', help='for a model that is not compiled (default: %(default)s)')
    add('--rounds', type=positive, default=15, help='turns of each (default: %(default)s)')
    add('--steps', type=positive, metavar='S', help='steps in a turn (default: as many as take 0.08 s, at least 3)')
    add('--json', metavar='FILE', help='write all figures there')
    add('--plot', metavar='FILE.png', help='draw speedup against ideal')
    links = ['  %-10s %-16s %3.0f us %7.2f GB/s' % (name, link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)
             for name, link in LINKS.items()]
    add = parser.add_argument_group('prediction', 'A link is one of\n%s\nor MICROSECONDS:GIGABYTES_PER_SECOND. With '
                                    'NVLink, transfers through the host use PCIe.' % '\n'.join(links)).add_argument
    add('--link', action='append', metavar='INNER+OUTER', dest='links', help='links within a host and between hosts; '
        'may be repeated (default: pcie4+10gbe and nvlink3+100gbe)')
    add('--devices-per-host', type=positive, default=8, metavar='D', help='(default: %(default)s)')
    add('--scaling', choices=('strong', 'weak'), default='strong', help='with strong, the whole batch keeps its size; '
        'with weak, the batch of each device does (default: %(default)s)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, predict, write and draw; return the exit code, 130 after Ctrl-C."""
    networks = {text: parse_network(text, args.devices_per_host)
                for text in args.links or ['pcie4+10gbe', 'nvlink3+100gbe']}
    check(args)
    os.environ['KERAS_BACKEND'] = 'theano'
    with quietly():
        contexts = init(args.contexts)
    recipe = Recipe(args.model, args.input_shape, args.optimizer, gpu=not any(map(is_cpu, contexts)))
    args.batch_size = args.batch_size or recipe.batch_size
    check_batch(args.batch_size, max(len(contexts), args.ranks or 1), recipe.input_shape)
    setting = describe(args, recipe, contexts)
    try:
        findings = measure_all(args, recipe, contexts)
    except KeyboardInterrupt:  # by now the started processes have ended
        note('interrupted')
        return 130
    if findings.in_half:
        networks = {text: in_half(network) for text, network in networks.items()}
    show(args, setting, findings, networks)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise a MgpuError for arguments that cannot work, before anything that takes time."""
    ranks, files = mpi_environment.size(), [path for path in (args.json, args.plot) if path]
    problems = [
        (ranks > 1, 'bench starts its own processes: run it without launch, with --ranks %d' % ranks),
        (args.model not in MODELS and not os.path.isfile(args.model),
         '--model %s: there is no such file, and no model of that name; give a file written by keras.Model.save, or '
         'one of %s' % (args.model, ', '.join(MODELS))),
        (args.plot and not args.plot.endswith('.png'),
         '--plot %s: the picture is a PNG; give a name that ends with .png' % args.plot)]
    for path in files:
        problems += [
            (os.path.isdir(path), '%s is a folder: give the name of a file' % path),
            (os.path.exists(path) and os.path.exists(args.model) and os.path.samefile(path, args.model),
             '%s is the model itself: choose another name' % path)]
    for wrong, message in problems:
        if wrong:
            raise MgpuError(message)
    for path in files:
        check_folder(path)
    try:
        list(map(check_writable, files))
    except OSError as error:
        raise MgpuError(error.strerror or str(error)) from error
    if args.plot and importlib.util.find_spec('matplotlib') is None:
        raise MissingError('--plot needs matplotlib, which is not installed: pip install "theano_mgpu[bench]", or omit '
                           '--plot')
    if args.ranks:
        choose_start(args.ranks, None, allocation())
        probe = mpi_library.probe()
        if probe.returncode:
            raise MissingError(mpi_library.missing(probe.stderr.strip().rpartition('\n')[2]))


def check_batch(batch_size: int, most: int, shape: Sequence[int] | None) -> None:
    """Raise a MgpuError for a batch with too few samples for `most` devices, or with too many for the memory here."""
    if batch_size < max(2, most):
        raise MgpuError('--batch-size %d: steps are timed on the whole batch and on its half, and each of %d devices '
                        'needs a sample; give %d or more' % (batch_size, most, max(2, most)))
    n_bytes, free = 8 * batch_size * math.prod(shape or ()), discovery.status('cpu', None).free_bytes
    if free is not None and n_bytes > free:
        raise MgpuError('--batch-size %d with samples of shape %s takes %s, and %s of memory are free: give less'
                        % (batch_size, tuple(shape or ()), human_bytes(n_bytes), human_bytes(free)))


def describe(args: argparse.Namespace, recipe: Recipe, contexts: Sequence[Context]) -> dict[str, Any]:
    """Print the machine, the model and the contexts; return the same as a dict for --json."""
    import keras
    import theano
    setting = dict(
        machine='%s, %s' % (discovery.status('cpu', None).name, counted(CORES, 'core')), cores=CORES,
        load=os.getloadavg()[0], versions='Python %s, NumPy %s, Theano %s, Keras %s' % (
            platform.python_version(), np.__version__, theano.__version__, keras.__version__),
        model=recipe.name, input_shape=recipe.input_shape, batch_size=args.batch_size, floatX=theano.config.floatX,
        contexts=[context._asdict() for context in contexts], rounds=args.rounds)
    print('{machine} (load {load:.1f} before the start); {versions}\n{model}{on}, batch {batch_size}, {floatX}; '
          'contexts: {all}'.format(
              on=' on inputs of ' + as_text(recipe.input_shape) if recipe.input_shape else '',
              all=', '.join('%s (%s)' % (context.name, context.device) for context in contexts), **setting), flush=True)
    if recipe.shrunk:
        note('%s on inputs of %s is slow on a CPU: smaller inputs are used; --input-shape sets their shape'
             % (recipe.name, as_text(MODELS[recipe.name].shape)))
    if setting['load'] > 0.5 * CORES:
        note('other programs are using this machine (load %.1f), which slows down what is measured' % setting['load'])
    if (args.ranks or 1) > CORES:
        note('%d ranks share %s' % (args.ranks, counted(CORES, 'core')))
    return setting


def as_text(shape: Sequence[int]) -> str:
    """Return a shape as text: ``28 x 28 x 1``."""
    return ' x '.join(map(str, shape))


def measure_all(args: argparse.Namespace, recipe: Recipe, contexts: Sequence[Context]) -> Findings:
    """Measure plain Keras, one context at several batch sizes, more contexts, and ranks, in turns; return Findings."""
    import theano

    from ...options import Options
    names, batch_size, steps = [context.name for context in contexts], args.batch_size, args.steps
    sizes = sorted({-(-batch_size // n) for n in (1, 2, 4, len(names))}, reverse=True)
    sides = [('plain', 0, 'plain Keras')] if contexts[0].kind == 'cpu' else []
    sides += [('contexts', n, counted(n, 'context')) for n in range(1, len(names) + 1)]
    contestants: list[Callable[[], list[Block]]] = []
    for kind, n, title in sides:
        model = recipe.replicate(names[:n]) if n else recipe.build()
        note('compiling for %s' % title)
        trainee = Trainee(model, recipe, [batch_size])
        steps = steps or trainee.steps_in_block(batch_size)
        contestants += [functools.partial(trainee.turn, kind, n or 1, size, steps)
                        for size in (sizes if n == 1 else [batch_size])]
    with contextlib.ExitStack() as stack:
        for n in range(1, (args.ranks or 0) + 1):
            note('starting %s' % counted(n, 'rank'))
            ranks = stack.enter_context(start_ranks(n, max(1, CORES // args.ranks), dict(
                model=recipe.name, input_shape=recipe.input_shape, optimizer=recipe.optimizer, batch_size=batch_size,
                sizes=[-(-batch_size // n), 2 * -(-batch_size // n)], steps=steps)))
            ranks.answer('ready'.__eq__)
            contestants.append(functools.partial(turn_of_ranks, ranks))
        with progress.bar(args.rounds * len(contestants), sys.stderr.isatty()) as bar:
            rounds = take_turns(contestants, args.rounds, bar)
    flags = theano.config.mgpu
    return Findings(rounds, batch_size, trainee.n_bytes, [most_sharing(contexts[:n + 1]) for n in range(len(contexts))],
                    link_to(contexts[0], trainee.n_bytes), Options().updates_on(contexts), flags.exchange == 'float16',
                    flags.overlap == 'True' and not flags.logical_shards, trainee.scheme, trainee.fits,
                    int(flags.logical_shards))


def show(args: argparse.Namespace, setting: dict[str, Any], findings: Findings, networks: dict[str, Network]) -> None:
    """Print the tables and the answer; write --json and draw --plot."""
    host = dict(copy_bytes_per_s=copy_rate(), reduce_bytes_per_s=reduce_rate(findings.n_bytes, 2))
    rows = findings.rows()
    model = findings.model(findings.medians)._replace(reduce_bytes_per_s=host['reduce_bytes_per_s'])
    predicted = predictions(model, args.batch_size, networks)
    answer = report.answer(findings, rows, networks, predicted)
    print('\nmedians of %s in turns; speedup over 1 context, or 1 rank, with the same whole batch\n%s\n\n%s\n'
          % (counted(args.rounds, 'round'), report.scaling_table(rows), report.phase_table(rows)))
    for sentence in [*answer, report.costs_line(model, host['copy_bytes_per_s'])]:
        print(textwrap.fill(sentence, WIDTH, initial_indent='- ', subsequent_indent='  '))
    print('\npredicted speedup and what limits it, %s scaling: devices that share no hardware, %d on a host\n%s'
          % (args.scaling, args.devices_per_host, report.prediction_table(predicted, networks, args.scaling)))
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
        report.draw(args.plot, title, rows, predicted, networks, args.scaling)
