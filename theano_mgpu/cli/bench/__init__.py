"""`theano-mgpu bench`: how a model scales, measured on 1 to N contexts and ranks, and predicted for more devices."""
import argparse
import contextlib
import json
import math
import os
import platform
import sys
import textwrap

import numpy as np

from ...devices import discovery
from ...devices.contexts import init
from ...errors import MgpuError
from ...jobs import mpi_environment
from ...utils import progress
from ...utils.files import check_writable, whole_text
from ...utils.tables import counted
from ..config import devices, positive
from ..output import human_bytes, note, quietly
from . import plot, report
from .costs import Findings, predictions
from .links import LINKS, in_half, parse_network
from .measure import Trainee, busiest, copy_rate, is_cpu, link_to, reduce_rate, take_turns
from .models import MODELS, Recipe, check_name
from .rank_group import RankGroup, check_mpi

WIDTH = 118  # of lines of the answer

EPILOG = """\
A model trains on synthetic data on 1, 2, ... N contexts of THEANO_FLAGS or .theanorc (see "theano-mgpu devices"), and
with --ranks on 1, 2, ... N processes; if contexts are CPUs, plain Keras takes part, too. All take turns, a few steps
at a time; figures are medians of the rounds. The whole batch has the same size for all, as in a script that changes
only the number of devices. The phases of a step: scatter (divide the batch) and host_to_device, launch (on GPUs) and
run (until devices have computed), device_to_host (gradients), all_reduce (add them), exchange (other values that all
contexts need, and all values between processes) and wait (for other processes), update and broadcast; other is the
time of Python and Keras.

Then it reports whether the model scales, what limits it, and from which batch size on N devices pay: their efficiency,
speedup / N, is then at least 70 %%. The prediction for 2 to 1024 devices comes from a cost model (described in
theano_mgpu/cli/bench/scaling.py and links.py): the measured costs of a step, on devices that share no hardware, and
the latency and bandwidth of --link. Its columns are three ways to add gradients: through the host, as this package
does; a ring of all devices; hierarchical, within a host, then between hosts. Measurement and prediction follow the
flags mgpu.update_on, mgpu.exchange and mgpu.overlap, which is predicted to hide as much as it can; of a placed model,
only the measurement does.

links:
%s
or MICROSECONDS:GIGABYTES_PER_SECOND. With NVLink, transfers through the host use PCIe.

examples:
  theano-mgpu bench --model mlp
  theano-mgpu bench --model cnn --contexts 4 --batch-size 512 --plot cnn.png
  theano-mgpu bench --model mlp --ranks 2 --json mlp.json
  theano-mgpu bench --model my_model.h5 --link pcie4+100gbe --link 5:50+20:3 --devices-per-host 4
  theano-mgpu bench --model resnet50 --input-shape 96 96 3 --batch-size 32 --scaling weak
""" % '\n'.join('  %-10s %-16s %3.0f us %7.2f GB/s' % (name, link.name, 1e6 * link.latency_s, link.bytes_per_s / 1e9)
               for name, link in LINKS.items())


def add_parser(sub):
    """Add the command to argparse's sub-parsers."""
    parser = sub.add_parser('bench', help='measure how a model scales, and predict', epilog=EPILOG,
                            description='Measure how training scales over contexts and ranks, and what limits it.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='cnn', metavar='NAME|FILE', help='%s, or a file written by keras.Model.save '
                        '(default: %%(default)s)' % ', '.join(MODELS))
    parser.add_argument('--contexts', type=devices, metavar='N', help='measure 1 to N (default: all that are mapped)')
    parser.add_argument('--ranks', type=devices, metavar='N', help='measure 1 to N processes, too; needs MPI')
    parser.add_argument('--batch-size', type=positive, metavar='B',
                        help='samples in the whole batch (default: 16 to 128, by the model)')
    parser.add_argument('--input-shape', type=positive, nargs='+', metavar='D', help='of a sample (default: the '
                        "model's; vgg16 and resnet50 on CPUs: 64 64 3)")
    parser.add_argument('--optimizer', default='adam', help='for a model that is not compiled (default: %(default)s)')
    parser.add_argument('--rounds', type=positive, default=15, help='turns of each (default: %(default)s)')
    parser.add_argument('--steps', type=positive, metavar='S', help='steps in a turn (default: as many as take 0.08 s, '
                        'at least 3)')
    parser.add_argument('--link', action='append', metavar='INNER+OUTER', dest='links', help='links within a host and '
                        'between hosts, for the prediction; may be repeated (default: pcie4+10gbe and nvlink3+100gbe)')
    parser.add_argument('--devices-per-host', type=positive, default=8, metavar='D', help='(default: %(default)s)')
    parser.add_argument('--scaling', choices=('strong', 'weak'), default='strong', help='what to predict: with strong, '
                        'the whole batch keeps its size; with weak, that of each device (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write all figures there')
    parser.add_argument('--plot', metavar='FILE.png', help='draw speedup against ideal')
    parser.set_defaults(run=run)


def run(args):
    """Measure, print, predict, write and draw; return the exit code, 130 after Ctrl-C."""
    networks = {text: parse_network(text, args.devices_per_host)
                for text in args.links or ['pcie4+10gbe', 'nvlink3+100gbe']}
    check(args)
    os.environ['KERAS_BACKEND'] = 'theano'
    with quietly():
        contexts = init(args.contexts)
    recipe = Recipe(args.model, args.input_shape, args.optimizer, gpu=not any(map(is_cpu, contexts)))
    batch_size = args.batch_size or recipe.batch_size
    check_batch(batch_size, max(len(contexts), args.ranks or 1), recipe.input_shape)
    setting = describe(args, recipe, contexts, batch_size)
    try:
        findings = measure_all(args, recipe, contexts, batch_size)
    except KeyboardInterrupt:  # the processes that were started have ended
        note('interrupted')
        return 130
    if findings.in_half:
        networks = {text: in_half(network) for text, network in networks.items()}
    show(args, setting, findings, networks)
    return 0


def check(args):
    """Raise a MgpuError for arguments that cannot work, before anything that takes time."""
    if mpi_environment.size() > 1:
        raise MgpuError('bench starts its own processes: run it without launch, with --ranks %d'
                        % mpi_environment.size())
    check_name(args.model)
    for path in filter(None, (args.json, args.plot)):
        check_file(path, args.model)
    if args.plot:
        if not args.plot.endswith('.png'):
            raise MgpuError('--plot %s: the picture is a PNG; give a name that ends with .png' % args.plot)
        plot.check_matplotlib()
    if args.ranks:
        check_mpi(args.ranks)


def check_file(path, model):
    """Raise a MgpuError for a file that cannot be written, or is the model."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise MgpuError('%s is a folder: give the name of a file' % path)
    if not os.access(folder, os.W_OK):
        raise MgpuError('%s cannot be written: there is no folder %s, or no permission to write there' % (path, folder))
    try:
        check_writable(path)
    except OSError as error:
        raise MgpuError(error.strerror or str(error)) from error
    if os.path.exists(model) and os.path.exists(path) and os.path.samefile(path, model):
        raise MgpuError('%s is the model itself: choose another name' % path)


def check_batch(batch_size, most, shape):
    """Raise a MgpuError for a batch with too few samples for `most` devices, or with too many for the memory here."""
    if batch_size < max(2, most):
        raise MgpuError('--batch-size %d: steps are timed on the whole batch and on its half, and each of %d devices '
                        'needs a sample; give %d or more' % (batch_size, most, max(2, most)))
    n_bytes, free = 8 * batch_size * math.prod(shape or ()), discovery.status('cpu', None).free_bytes
    if free is not None and n_bytes > free:
        raise MgpuError('--batch-size %d with samples of shape %s takes %s, and %s of memory are free: give less'
                        % (batch_size, tuple(shape), human_bytes(n_bytes), human_bytes(free)))


def describe(args, recipe, contexts, batch_size):
    """Print what is measured, and where; return the same as a dict for --json."""
    import keras
    import theano
    machine = '%s, %s' % (discovery.status('cpu', None).name, counted(cores(), 'core'))
    versions = 'Python %s, NumPy %s, Theano %s, Keras %s' % (platform.python_version(), np.__version__,
                                                            theano.__version__, keras.__version__)
    load = os.getloadavg()[0]
    print('%s (load %.1f before the start); %s' % (machine, load, versions))
    print('%s%s, batch %d, %s; contexts: %s' % (
        recipe.name, ' on inputs of ' + ' x '.join(map(str, recipe.input_shape)) if recipe.input_shape else '',
        batch_size, theano.config.floatX, ', '.join('%s (%s)' % (each.name, each.device) for each in contexts)),
        flush=True)
    if recipe.shrunk:
        note('%s on inputs of %s is slow on a CPU: smaller inputs are used; --input-shape sets their shape'
             % (recipe.name, ' x '.join(map(str, recipe.known.shape))))
    if load > 0.5 * cores():
        note('other programs are using this machine (load %.1f), which slows down what is measured' % load)
    if (args.ranks or 1) > cores():
        note('%d ranks share %s' % (args.ranks, counted(cores(), 'core')))
    return dict(machine=machine, cores=cores(), load=load, versions=versions, model=recipe.name,
                input_shape=recipe.input_shape, batch_size=batch_size, floatX=theano.config.floatX,
                contexts=[each._asdict() for each in contexts], rounds=args.rounds)


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def measure_all(args, recipe, contexts, batch_size):
    """Let one context at several batch sizes, more contexts, plain Keras and ranks take turns; return Findings."""
    import theano

    from ...options import Options
    names = [context.name for context in contexts]

    def share(n):
        return -(-batch_size // n)
    sizes = sorted({batch_size, share(2), share(4), share(len(names))}, reverse=True)

    def trainee(model, title):
        note('compiling for %s' % title)
        compiled = Trainee(model, recipe, batch_size)
        compiled.steps(batch_size, 1)
        return compiled

    trainees = [trainee(recipe.replicate(names[:n]), counted(n, 'context')) for n in range(1, len(names) + 1)]
    steps = args.steps or trainees[0].steps_in(batch_size)

    def contestant(kind, n, size, trainee):
        return lambda: [trainee.block(kind, n, size, steps)]

    contestants = [contestant('contexts', 1, size, trainees[0]) for size in sizes]
    contestants += [contestant('contexts', n, batch_size, each) for n, each in enumerate(trainees[1:], 2)]
    if contexts[0].kind == 'cpu':
        contestants.append(contestant('plain', 1, batch_size, trainee(recipe.build(), 'plain Keras')))
    with contextlib.ExitStack() as stack:
        for n in range(1, (args.ranks or 0) + 1):
            note('starting %s' % counted(n, 'rank'))
            group = stack.enter_context(RankGroup(  # each rank has as many threads as there are for each of the most
                n, max(1, cores() // args.ranks), recipe, batch_size=batch_size, steps=steps,
                sizes=sizes if n == 1 else [share(n), 2 * share(n)]))
            group.wait()
            contestants.append(group.turn)
        with progress.bar(args.rounds * len(contestants), sys.stderr.isatty()) as bar:
            rounds = take_turns(contestants, args.rounds, bar)
    n_bytes, flags = trainees[0].n_bytes, theano.config.mgpu
    return Findings(rounds, batch_size, n_bytes, [busiest(contexts[:n + 1]) for n in range(len(contexts))],
                    link_to(contexts[0], n_bytes), Options().updates_on(contexts), flags.exchange == 'float16',
                    flags.overlap == 'True')


def show(args, setting, findings, networks):
    """Print the tables and the answer; write --json and draw --plot."""
    rows, checks = findings.rows(), findings.checks()
    host = dict(copy_bytes_per_s=copy_rate(), reduce_bytes_per_s=reduce_rate(findings.n_bytes, 2))
    costs = findings.costs(findings.medians, reduce_bytes_per_s=host['reduce_bytes_per_s'])
    predicted = predictions(costs, findings.batch_size, networks)
    answer = (report.measured_answer(findings, rows, checks) + report.batch_answer(findings)
              + report.predicted_answer(findings.batch_size, networks, predicted))
    print('\nmedians of %s in turns; speedup over 1 context, or 1 rank, with the same whole batch'
          % counted(args.rounds, 'round'))
    print(report.scaling_table(rows))
    print('\n' + report.phase_table(rows) + '\n')
    for sentence in answer + [report.costs_line(costs, findings.link, host['copy_bytes_per_s'])]:
        print(textwrap.fill(sentence, WIDTH, initial_indent='- ', subsequent_indent='  '))
    print('\npredicted speedup and what limits it, %s scaling: devices that share no hardware, %d on a host'
          % (args.scaling, args.devices_per_host))
    print(report.prediction_table(predicted, networks, args.scaling))
    if args.json:
        figures = dict(setting, rows=rows, checks=checks, costs=costs._asdict(), host=host,
                       link=findings.link._asdict(), n_bytes=findings.n_bytes, predictions=predicted, answer=answer,
                       blocks=[block._asdict() for key in findings.rounds[0] for block in findings.each(key)])
        with whole_text(args.json) as file:  # infinity, which JSON cannot express, becomes null
            json.dump(json.loads(json.dumps(figures), parse_constant=lambda _: None), file, indent=1)
    if args.plot:
        title = '%s, batch %d, %s scaling predicted\n%s' % (
            os.path.basename(args.model), findings.batch_size, args.scaling, setting['machine'])
        plot.draw(args.plot, title, rows, costs, findings.batch_size, networks, args.scaling == 'weak')
