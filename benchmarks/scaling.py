#!/usr/bin/env python
"""Training over processes, and prediction: this package against plain Keras on Theano, PyTorch, TensorFlow.

The figure is the seconds that 1,280 samples take, ten batches of 128, after warm-up: of `fit`, of train_on_batch (step)
or of `predict`, by --call. In a round each contender computes an epoch in turn, and the order changes from round to
round; the others sleep.

  cnn   Conv2D 32 3x3 relu, MaxPooling 2, Flatten, Dense 10 softmax, on 28x28x1
  mlp   784-1024-1024-10, relu and softmax
  lstm  LSTM 64 over 20 steps of 32 values, Dense 10 softmax
  autoencoder  Conv2D 16, 32, 64 3x3 with stride 2, Conv2DTranspose 32, 16, 1 with stride 2, on 32x32x1
  words Embedding of 200,000 words, 64, the mean of 10 words, Dense 10 softmax; SGD
  all   Adam (words: SGD), float32, sparse categorical cross-entropy (the autoencoder: mean squared error); the batch is
        the whole one, divided among the workers

"Under run" is plain Keras under theano_mgpu.enable(), with as many cores as threads, each of them a context.
"Sharded update" is theano_mgpu with mgpu.update_on=sharded: each worker updates a share of the parameters. PyTorch runs
DistributedDataParallel on gloo, TensorFlow MirroredStrategy over logical CPU devices. "Keras on Theano" imports
theano_mgpu, which makes Theano faster; --without adds Theano as it is (no lstm: its first loop does not compile on
Python 3.9 and later). Examples:

  python benchmarks/scaling.py
  python benchmarks/scaling.py --models cnn --ranks 1 2 4 8 --threads 1 8
  python benchmarks/scaling.py --call predict --ranks 2
  python benchmarks/scaling.py --models cnn mlp autoencoder --without --ranks 1 --threads 1
  python benchmarks/scaling.py --torch venv_torch/bin/python --tensorflow venv_tf/bin/python --plot scaling.png
"""
import argparse
import collections
import contextlib
import os
import sys

from theano_mgpu.cli.shared_arguments import positive
from theano_mgpu.utils.tables import counted

import contest
from scaling_workers import CALLS, SAMPLES, SHAPES
from turns import spread

WORKERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'scaling_workers.py')
OURS = 'mgpu', 'sharded'
TITLES = {'without': 'without theano_mgpu', 'keras': 'Keras on Theano', 'cores': 'under run', 'mgpu': 'theano_mgpu',
          'sharded': 'sharded update', 'torch': 'PyTorch', 'tensorflow': 'TensorFlow'}

PROBES = {  # imports that a kind needs; the code prints their versions
    'mgpu': 'import theano_mgpu, keras, mpi4py, theano; print("Theano %s, Keras %s, theano_mgpu %s, mpi4py %s" % '
            '(theano.__version__, keras.__version__, theano_mgpu.__version__, mpi4py.__version__))',
    'torch': 'import numpy, torch, torch.distributed; print("PyTorch " + torch.__version__)',
    'tensorflow': 'import numpy, tensorflow; print("TensorFlow " + tensorflow.__version__)',
}


class Contender(collections.namedtuple('Contender', 'kind workers threads')):
    """A side of the contest: a kind of `TITLES`, the number of workers, and the threads of each."""

    @property
    def label(self):
        """The name in the picture."""
        return '%s, %s' % (TITLES[self.kind], counted(self.workers, 'rank' if self.kind in OURS else 'worker')
                           if self.workers > 1 or self.kind in OURS else counted(self.threads, 'thread'))


def command_of(contender, model, arguments):
    """Return the command of a worker."""
    args = [contender.kind, '--model', model, '--workers', str(contender.workers),
            '--threads', str(contender.threads), '--batch-size', str(arguments.batch_size), '--call', arguments.call]
    if contender.kind in OURS:
        return contest.launch(contender.workers, WORKERS, args)
    return [{'torch': arguments.torch, 'tensorflow': arguments.tensorflow}.get(contender.kind) or sys.executable,
            WORKERS] + args


def contenders(arguments):
    """Return the contenders, in the order of the table."""
    one = [(1, threads) for threads in arguments.threads]
    several = [(ranks, 1) for ranks in arguments.ranks]
    sides = [Contender(kind, *pair) for kind in ['without'] * arguments.without + ['keras'] for pair in one]
    sides += [Contender('cores', *pair) for pair in one if pair[1] > 1]
    sides += [Contender('mgpu', *pair) for pair in several]
    if arguments.call != 'predict':  # which updates nothing
        sides += [Contender('sharded', *pair) for pair in several if pair[0] > 1]
    for kind in ('torch', 'tensorflow'):
        if getattr(arguments, kind):
            sides += [Contender(kind, *pair) for pair in one + several]
    return list(dict.fromkeys(sides))


def measure(model, arguments):
    """Return the seconds of each contender, a list of one a round.

    Parameters
    ----------
    model : str
    arguments : argparse.Namespace

    Returns
    -------
    dict of Contender to list of float
    """
    def start(contender):
        return contest.start_worker(contender, command_of(contender, model, arguments))

    with contextlib.ExitStack() as stack:
        workers = contest.started(stack, contenders(arguments), start, model)
        return contest.epochs_in_turns(workers, arguments.rounds, model)


def best_plain(rows):
    """Return the time of plain Keras, with as many threads as suit it best."""
    return min(row['median'] for row in rows if row['kind'] == 'keras')


def table(model, seconds):
    """Return the rows of a model's table.

    Parameters
    ----------
    model : str
    seconds : dict of Contender to list of float

    Returns
    -------
    list of dict
    """
    rows = [dict(contender._asdict(), model=model, label=contender.label, **spread(values)._asdict(), seconds=values)
            for contender, values in seconds.items()]
    best = best_plain(rows)
    return [dict(row, ratio=row['median'] / best) for row in rows]


def print_table(model, rows, arguments):
    """Print a model's table."""
    print('\n%s, batch %d: seconds per %s samples, %s, %s; ratio: to the best time of plain Keras'
          % (model, arguments.batch_size, format(SAMPLES, ','), arguments.call, counted(arguments.rounds, 'round')))
    print('%-16s %8s %8s %8s %8s %8s %8s' % ('', 'workers', 'threads', 'median', 'lowest', 'highest', 'ratio'))
    for row in rows:
        print('%-16s %8d %8d %8.3f %8.3f %8.3f %8.2f' % (TITLES[row['kind']], row['workers'], row['threads'],
                                                         row['median'], row['lowest'], row['highest'], row['ratio']))


def panel(axis, model, rows):
    """Draw one model's bars."""
    contest.bars(axis, rows, lambda row: row['kind'] in OURS, lambda median: '%.2f' % median, best_plain(rows),
                 'best plain Keras')
    axis.set_title(model)
    axis.set_xlabel('seconds per %s samples (less is better)' % format(SAMPLES, ','))


def make_parser():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contest.add_options(parser, SHAPES, 'scaling.png')
    parser.add_argument('--ranks', nargs='+', type=positive, default=[1, 2], metavar='R', help='numbers of workers, '
                        'with one thread each (default 1 2)')
    parser.add_argument('--threads', nargs='+', type=positive, default=[1, 2], metavar='T', help='numbers of threads '
                        'of what runs in one worker (default 1 2)')
    parser.add_argument('--batch-size', type=positive, default=128, metavar='N', help='samples in the whole batch '
                        '(default %(default)s)')
    parser.add_argument('--call', choices=CALLS, default='fit', help='the calls that are timed (default %(default)s)')
    parser.add_argument('--without', action='store_true', help='Keras on Theano without this package, too')
    parser.add_argument('--torch', metavar='PYTHON', help='an interpreter that has PyTorch, to compare with it')
    parser.add_argument('--tensorflow', metavar='PYTHON', help='one that has TensorFlow')
    return parser


def check(parser, arguments):
    """End with a message, before anything long is contest.started, if something that was asked for is missing."""
    for name in ('models', 'ranks', 'threads'):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))  # each one once
    if arguments.batch_size > SAMPLES:
        parser.error('--batch-size %d: an epoch has %d samples' % (arguments.batch_size, SAMPLES))
    last = SAMPLES % arguments.batch_size or arguments.batch_size
    if last < max(arguments.ranks):
        parser.error('--batch-size %d --ranks %d: the last batch has %d samples, fewer than workers'
                     % (arguments.batch_size, max(arguments.ranks), last))
    contest.check_common(parser, arguments)


def versions(parser, arguments):
    """Return the versions of everything that takes part; end with a message if something is missing."""
    pythons = {'mgpu': sys.executable, 'torch': arguments.torch, 'tensorflow': arguments.tensorflow}
    try:
        return [contest.probe(python, PROBES[kind], TITLES[kind]) for kind, python in pythons.items() if python]
    except ValueError as error:
        parser.error(str(error))


def main():
    parser = make_parser()
    arguments = parser.parse_args()
    check(parser, arguments)
    environment = contest.announce(versions(parser, arguments), max(arguments.ranks))
    tables = contest.tables_of(arguments.models, lambda model: table(model, measure(model, arguments)),
                       lambda model, rows: print_table(model, rows, arguments))
    contest.keep(arguments, tables, environment, 'Training over processes', panel, samples=SAMPLES)


if __name__ == '__main__':
    main()
