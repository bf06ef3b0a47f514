#!/usr/bin/env python
"""The speed of predictions: this package's Predictor against plain Keras, and against a pool of processes.

The figure is samples per second, over 2,560 samples in batches of 128. In a round each contender predicts all of them
in turn, and the order changes from round to round; the others sleep.

  cnn   Conv2D 32 3x3 relu, MaxPooling 2, Flatten, Dense 10 softmax, on 28x28x1
  mlp   784-1024-1024-10, relu and softmax
  both  float32, loaded from one file by all

Who takes part: model.predict; a Predictor on one context, on several `cpu` contexts, over several MPI ranks, and on
OpenCL devices if there are any; a multiprocessing.Pool of plain Keras models. Before anything is timed, the predictions
of each are compared with plain Keras's, which also fills Theano's folder of compiled code. Contexts, ranks and
processes have one thread each; OpenCL devices on a CPU share its cores.

  ratio   to plain Keras with one thread; of OpenCL devices, to the first one alone
  first   seconds from the end of the imports until the outputs of the first batch are there: the model is loaded,
          compiled with the help of Theano's folder, and run (a pool starts its processes then, and they import)
  memory  MiB, the sum over a contender's processes of the peak resident memory of each; shared pages count repeatedly

Examples:

  python benchmarks/predict.py
  python benchmarks/predict.py --models cnn --workers 2 4 8 --threads 1 8 --no-opencl
  python benchmarks/predict.py --batch-size 32 --json predict.json --plot predict.png

Other programs that compile at the same time, and a folder with thousands of modules, make `first` longer. To use a
separate folder:

  THEANO_FLAGS=base_compiledir=/tmp/predict_theano python benchmarks/predict.py
"""
import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile

from theano_mgpu.cli.shared_arguments import positive
from theano_mgpu.utils.tables import counted

import contest
import numpy as np
from turns import spread
from worker import WorkerError

TOLERANCES = {False: 1e-6, True: 1e-5}  # differences from plain Keras, relative to the largest value; True: on OpenCL
VERSIONS = ('import theano_mgpu, keras, mpi4py, theano; print("Theano %s, Keras %s, theano_mgpu %s, mpi4py %s" % '
            '(theano.__version__, keras.__version__, theano_mgpu.__version__, mpi4py.__version__))')
OPENCL = ('import json; from theano_mgpu.devices import discovery; '
          'print(json.dumps(discovery.discover("opencl")[0]))')
WORKERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'predict_workers.py')


class Contender(collections.namedtuple('Contender', 'kind devices workers threads')):
    """A side of the contest: a kind of worker, devices of a process, processes, threads of each."""

    @property
    def opencl(self):
        """True for OpenCL devices."""
        return any(device.startswith('opencl') for device in self.devices)

    @property
    def label(self):
        """The name in the table and the picture.

        Examples
        --------
        >>> Contender('keras', (), 1, 2).label, Contender('predictor', ('cpu',), 2, 1).label
        ('plain Keras, 2 threads', 'Predictor, 2 ranks')
        """
        if self.kind == 'save':
            return 'maker of the model'
        if self.kind == 'keras':
            return 'plain Keras, ' + counted(self.threads, 'thread')
        if self.kind == 'pool':
            return 'multiprocessing.Pool(%d)' % self.workers
        if self.opencl:
            return 'Predictor, ' + counted(len(self.devices), 'OpenCL device')
        for number, noun in ((self.workers, 'rank'), (len(self.devices), 'context')):
            if number > 1:
                return 'Predictor, ' + counted(number, noun)
        return 'Predictor, 1 context, ' + counted(self.threads, 'thread')


def contenders(arguments, opencl):
    """Return the contenders, in the order of the table.

    Parameters
    ----------
    arguments : argparse.Namespace
    opencl : list of str
        The OpenCL devices.
    """
    several = [n for n in arguments.workers if n > 1]
    sides = [Contender('keras', (), 1, threads) for threads in arguments.threads]
    sides += [Contender('predictor', ('cpu',), 1, threads) for threads in arguments.threads]
    sides += [Contender('predictor', ('cpu',) * n, 1, 1) for n in several]
    sides += [Contender('predictor', ('cpu',), n, 1) for n in several]
    sides += [Contender('pool', (), n, 1) for n in several]
    return sides + [Contender('predictor', tuple(opencl[:n]), 1, contest.CORES)
                    for n in [1] + several if n <= len(opencl)]


def command_of(contender, model, folder, arguments):
    """Return the command of a worker."""
    contexts = ';'.join('dev%d->%s' % pair for pair in enumerate(contender.devices))
    args = [contender.kind, '--model', model, '--contexts', contexts,
            '--workers', str(contender.workers), '--batch-size', str(arguments.batch_size),
            '--samples', str(arguments.samples),
            '--file', os.path.join(folder, 'model.h5'), '--output', output_of(contender, folder)]
    if contender.kind == 'predictor' and contender.workers > 1:
        return contest.launch(contender.workers, WORKERS, args)
    return [sys.executable, WORKERS] + args


def output_of(contender, folder):
    """Return the file of a contender's predictions."""
    return os.path.join(folder, contender.label + '.npy')


def difference(outputs, wanted, tolerance, label):
    """Return the largest difference of predictions / the largest value; raise a WorkerError if it is too large.

    Examples
    --------
    >>> difference(np.array([4., 2.]), np.array([4., 1.]), 0.5, 'who')
    0.25
    """
    if outputs.shape != wanted.shape:
        raise WorkerError('"%s" predicts an array of shape %s, plain Keras one of %s'
                          % (label, outputs.shape, wanted.shape))
    largest = float(np.abs(outputs - wanted).max() / np.abs(wanted).max())
    if not largest <= tolerance:  # NaN compares false
        raise WorkerError('"%s" predicts differently from plain Keras: the largest difference is %.2g of the '
                          'largest value, more than %g' % (label, largest, tolerance))
    return largest


def peak_memory(pid):
    """Return the MiB that a process and its descendants had resident, each at its peak."""
    children, peaks = collections.defaultdict(list), {}
    for number in filter(str.isdecimal, os.listdir('/proc')):
        with contextlib.suppress(OSError), open('/proc/%s/status' % number) as file:  # it may have ended by now
            fields = dict(line.split(':', 1) for line in file)
            children[int(fields['PPid'])].append(int(number))
            peaks[int(number)] = int(fields.get('VmHWM', '0').split()[0])
    tree = [pid]
    for member in tree:  # the list grows
        tree += children[member]
    return sum(peaks.get(member, 0) for member in tree) / 1024


def measure(model, sides, arguments):
    """Return the rows of a model's table, without the ratios.

    Parameters
    ----------
    model : str
    sides : list of Contender
    arguments : argparse.Namespace

    Returns
    -------
    list of dict
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='predict-'))

        def start(contender):
            return contest.start_worker(contender, command_of(contender, model, folder, arguments))

        differences = compare(start, sides, folder, model)
        workers = contest.started(stack, sides, start, model)
        firsts = [contest.next_number(worker) for worker in workers.values()]
        seconds = contest.epochs_in_turns(workers, arguments.rounds, model)
        peaks = [peak_memory(worker.pid) for worker in workers.values()]
    rates = {contender: spread([arguments.samples / each for each in values]) for contender, values in seconds.items()}
    return [dict(contender._asdict(), model=model, label=contender.label, **rates[contender]._asdict(), first=first,
                 memory=peak, difference=differences[contender], seconds=seconds[contender])
            for contender, first, peak in zip(workers, firsts, peaks)]


def compare(start, sides, folder, model):
    """Return the difference of each contender's predictions from plain Keras's; afterwards everything is compiled."""
    from tqdm import tqdm
    maker, differences = Contender('save', (), 1, 1), {}
    with start(maker):
        wanted = np.load(output_of(maker, folder))
    for contender in tqdm(sides, desc='%s: comparing' % model, unit=' contenders', disable=None, leave=False):
        with start(contender):
            outputs = np.load(output_of(contender, folder))
        differences[contender] = difference(outputs, wanted, TOLERANCES[contender.opencl], contender.label)
    return differences


def plain(rows):
    """Return the samples per second of plain Keras with one thread."""
    return next(row['median'] for row in rows if row['kind'] == 'keras' and row['threads'] == 1)


def on_opencl(row):
    """Return whether a row is of OpenCL devices."""
    return Contender(*(row[field] for field in Contender._fields)).opencl


def with_ratios(rows):
    """Return rows with their ratios: to plain Keras with one thread, or to one OpenCL device."""
    first = next((row['median'] for row in rows if on_opencl(row)), None)
    return [dict(row, ratio=row['median'] / (first if on_opencl(row) else plain(rows))) for row in rows]


def print_table(model, rows, arguments):
    """Print a model's table."""
    print('\n%s, batch %d: samples/s of prediction, %s samples, %s; ratio: to plain Keras with 1 thread (of OpenCL: to '
          '1 device);\nfirst: seconds until the first batch is there; memory: peak of all processes, MiB'
          % (model, arguments.batch_size, format(arguments.samples, ','), counted(arguments.rounds, 'round')))
    print('%-32s %8s %8s %8s %8s %8s %8s' % ('', 'median', 'lowest', 'highest', 'ratio', 'first', 'memory'))
    for row in rows:
        print('%-32s %8.0f %8.0f %8.0f %8.2f %8.2f %8.0f' % (row['label'], row['median'], row['lowest'], row['highest'],
                                                             row['ratio'], row['first'], row['memory']))


def panel(axis, model, rows):
    """Draw one model's bars."""
    contest.bars(axis, rows, lambda row: row['kind'] == 'predictor', lambda median: format(round(median), ','),
                 plain(rows), 'plain Keras, 1 thread')
    axis.locator_params(axis='x', nbins=5)  # more of such long numbers would touch each other
    axis.xaxis.set_major_formatter('{x:,.0f}')
    axis.set_title(model, loc='left')
    axis.set_xlabel('samples per second (more is better)')


def make_parser():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contest.add_options(parser, ['cnn', 'mlp'], 'predict.png')
    parser.add_argument('--workers', nargs='+', type=positive, default=[2], metavar='W', help='numbers of contexts, '
                        'ranks and processes, with one thread each (default 2)')
    parser.add_argument('--threads', nargs='+', type=positive, default=[1, 2], metavar='T', help='numbers of threads '
                        'of what runs on one context; 1 is always among them (default 1 2)')
    parser.add_argument('--samples', type=positive, default=2560, metavar='N', help='(default %(default)s)')
    parser.add_argument('--batch-size', type=positive, default=128, metavar='N', help='(default %(default)s)')
    parser.add_argument('--no-opencl', action='store_true', help='leave the OpenCL devices out')
    return parser


def check(parser, arguments):
    """End with a message, before anything long is started, if something that was asked for is missing."""
    arguments.threads = [1] + arguments.threads  # the ratios compare with one thread
    for name in ('models', 'workers', 'threads'):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))  # each one once
    if arguments.batch_size > arguments.samples:
        parser.error('--batch-size %d: there are %s' % (arguments.batch_size, counted(arguments.samples, 'sample')))
    contest.check_common(parser, arguments)


def main():
    parser = make_parser()
    arguments = parser.parse_args()
    check(parser, arguments)
    try:
        versions = [contest.probe(sys.executable, VERSIONS, 'Keras')]
        opencl = [] if arguments.no_opencl else json.loads(contest.probe(sys.executable, OPENCL, 'OpenCL'))
    except ValueError as error:
        parser.error(str(error))
    environment = contest.announce(versions, max(arguments.workers))
    sides = contenders(arguments, opencl)
    tables = contest.tables_of(arguments.models, lambda model: with_ratios(measure(model, sides, arguments)),
                       lambda model, rows: print_table(model, rows, arguments))
    contest.keep(arguments, tables, environment, 'Prediction', panel, samples=arguments.samples)


if __name__ == '__main__':
    main()
