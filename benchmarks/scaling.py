#!/usr/bin/env python
"""How training scales over processes: this package over MPI ranks, against plain Keras on Theano, PyTorch, TensorFlow.

The figure is the seconds that 1,280 samples take, ten batches of 128: training only, after warm-up. In a round each
contender trains an epoch in turn, and the order changes from round to round; the others sleep meanwhile.

  cnn   Conv2D 32 3x3 relu, MaxPooling 2, Flatten, Dense 10 softmax, on 28x28x1
  mlp   784-1024-1024-10, relu and softmax
  both  Adam, sparse categorical cross-entropy, float32; the batch is the whole one, divided among the workers

PyTorch runs DistributedDataParallel on gloo, TensorFlow MirroredStrategy over logical CPU devices. Examples:

  python benchmarks/scaling.py
  python benchmarks/scaling.py --models cnn --ranks 1 2 4 8 --threads 1 8
  python benchmarks/scaling.py --torch venv_torch/bin/python --tensorflow venv_tf/bin/python --plot scaling.png
"""
# The workers run this file, too, and theirs may be an interpreter with numpy and torch alone: nothing else is
# imported up here.
import argparse
import collections
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from scaling_workers import SAMPLES, SHAPES, WORK

SETTLE = 0.1      # seconds before each epoch: idle threads of OpenBLAS and OpenMP spin for some milliseconds
PATIENCE = 900    # seconds that an answer may take, compilation included
TAIL = 3000       # characters of a failed worker's stderr that are shown
TITLES = {'keras': 'Keras on Theano', 'mgpu': 'theano_mgpu', 'torch': 'PyTorch', 'tensorflow': 'TensorFlow'}

PROBES = {  # what has to be importable for a kind, and the versions that it prints
    'mgpu': 'import theano_mgpu, keras, mpi4py, theano; print("Theano %s, Keras %s, theano_mgpu %s, mpi4py %s" % '
            '(theano.__version__, keras.__version__, theano_mgpu.__version__, mpi4py.__version__))',
    'torch': 'import numpy, torch, torch.distributed; print("PyTorch " + torch.__version__)',
    'tensorflow': 'import numpy, tensorflow; print("TensorFlow " + tensorflow.__version__)',
}


class Contender(collections.namedtuple('Contender', 'kind workers threads')):
    """Who trains: a kind of `TITLES`, so many workers, each with so many threads."""

    @property
    def label(self):
        """What it is called in the picture."""
        return '%s, %s' % (TITLES[self.kind], counted(self.workers, 'rank' if self.kind == 'mgpu' else 'worker')
                           if self.workers > 1 or self.kind == 'mgpu' else counted(self.threads, 'thread'))


def counted(n, noun):
    """A number and its noun.

    Examples
    --------
    >>> counted(1, 'rank'), counted(2, 'rank')
    ('1 rank', '2 ranks')
    """
    return '%d %s%s' % (n, noun, 's' if n != 1 else '')


class WorkerError(Exception):
    """A worker ended, or did not answer."""


def launch(ranks, script, args):
    """The command that runs a script of this project as so many MPI ranks."""
    return [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(ranks), script] + args


def command_of(contender, model, arguments):
    """The command of a worker."""
    script = os.path.abspath(__file__)
    args = ['--worker', contender.kind, '--models', model, '--ranks', str(contender.workers),
            '--threads', str(contender.threads), '--batch-size', str(arguments.batch_size)]
    if contender.kind == 'mgpu':
        return launch(contender.workers, script, args)
    return [{'torch': arguments.torch, 'tensorflow': arguments.tensorflow}.get(contender.kind) or sys.executable,
            script] + args


def environment_of(contender):
    """The environment of a worker: its threads, the CPU, float32."""
    environment = dict(os.environ, KERAS_BACKEND='theano', CUDA_VISIBLE_DEVICES='', TF_CPP_MIN_LOG_LEVEL='2')
    flags = [flag for flag in (os.environ.get('THEANO_FLAGS'), 'device=cpu,floatX=float32') if flag]
    environment['THEANO_FLAGS'] = ','.join(flags)  # of two values the last one counts
    environment.setdefault('GLOO_SOCKET_IFNAME', 'lo')  # the host's own name need not resolve
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
        environment[name] = str(contender.threads)
    return environment


class Worker:
    """A contender's process, or its processes; a context manager that ends them.

    Parameters
    ----------
    contender : Contender
    model : str
    arguments : argparse.Namespace

    Raises
    ------
    WorkerError
        Here and in `epoch`: if it ends, or takes longer than `PATIENCE`, before it has answered.
    """

    def __init__(self, contender, model, arguments):
        self.contender = contender
        self._stderr = tempfile.TemporaryFile('w+', errors='replace')
        self._process = subprocess.Popen(
            command_of(contender, model, arguments), env=environment_of(contender), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._stderr, universal_newlines=True,
            start_new_session=True)  # Ctrl-C comes to this process alone, which ends them in order
        try:
            self._answer(lambda line: line == 'ready')
        except BaseException:
            self.kill()
            raise

    def epoch(self):
        """Train an epoch.

        Returns
        -------
        float
            Its seconds.
        """
        try:
            self._process.stdin.write('go\n')
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer tells why
        return float(self._answer(is_number))

    def _answer(self, expected):
        """The next line that is an answer: libraries print, too."""
        timer = threading.Timer(PATIENCE, self._process.terminate)
        timer.start()
        began = time.monotonic()
        try:
            for line in iter(self._process.stdout.readline, ''):
                if expected(line.strip()):
                    return line
        finally:
            timer.cancel()
        raise WorkerError(self._failure(time.monotonic() - began >= PATIENCE))

    def _failure(self, late):
        self.kill()
        self._stderr.seek(0)
        tail = self._stderr.read()[-TAIL:].strip()
        what = 'did not answer within %d s' % PATIENCE if late else 'ended with exit code %s' % self._process.returncode
        return ('the worker "%s" %s before an answer. The end of its stderr:\n%s'
                % (self.contender.label, what, tail or '(nothing)'))

    def kill(self):
        """End it and whatever it has started; mpirun ends its ranks when it is terminated."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its commands
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()
        self._process.stdout.close()
        self._stderr.close()


def is_number(text):
    """Whether a line is one.

    Examples
    --------
    >>> is_number('0.25'), is_number('WARNING: 0.25')
    (True, False)
    """
    try:
        float(text)
    except ValueError:
        return False
    return True


def contenders(arguments):
    """Who takes part, in the order of the table."""
    one = [(1, threads) for threads in arguments.threads]
    several = [(ranks, 1) for ranks in arguments.ranks]
    found = [Contender('keras', *pair) for pair in one] + [Contender('mgpu', *pair) for pair in several]
    for kind in ('torch', 'tensorflow'):
        if getattr(arguments, kind):
            found += [Contender(kind, *pair) for pair in one + several]
    return list(dict.fromkeys(found))


def turns(found, number):
    """The order of a round.

    Examples
    --------
    >>> turns('abc', 0), turns('abc', 1), turns('abc', 2)
    ('abc', 'acb', 'cab')
    """
    start = number % len(found)
    return (found[start:] + found[:start])[::-1 if number % 2 else 1]


def measure(model, arguments):
    """Seconds of each contender, a list of one a round.

    Parameters
    ----------
    model : str
    arguments : argparse.Namespace

    Returns
    -------
    dict of Contender to list of float
    """
    from tqdm import tqdm
    found = contenders(arguments)
    seconds = {contender: [] for contender in found}
    with contextlib.ExitStack() as stack:
        # One after the other: they would wait for each other at the lock of Theano's folder of compiled code.
        bar = tqdm(found, desc='%s: starting' % model, unit=' contenders', disable=None, leave=False)
        workers = [stack.enter_context(Worker(contender, model, arguments)) for contender in bar]
        for number in tqdm(range(arguments.rounds), desc=model, unit=' rounds', disable=None):
            for worker in turns(workers, number):
                time.sleep(SETTLE)
                seconds[worker.contender].append(worker.epoch())
    return seconds


def best_plain(rows):
    """The time of plain Keras, with as many threads as suit it best."""
    return min(row['median'] for row in rows if row['kind'] == 'keras')


def table(model, seconds):
    """The rows of a model's table.

    Parameters
    ----------
    model : str
    seconds : dict of Contender to list of float

    Returns
    -------
    list of dict
    """
    rows = [dict(contender._asdict(), model=model, label=contender.label, median=float(np.median(values)),
                 lowest=min(values), highest=max(values), seconds=values) for contender, values in seconds.items()]
    best = best_plain(rows)
    return [dict(row, ratio=row['median'] / best) for row in rows]


def print_table(model, rows, arguments):
    """A model's table."""
    print('\n%s, batch %d: seconds per %s samples of training, %s; ratio: to the best time of plain Keras'
          % (model, arguments.batch_size, format(SAMPLES, ','), counted(arguments.rounds, 'round')))
    print('%-16s %8s %8s %8s %8s %8s %8s' % ('', 'workers', 'threads', 'median', 'lowest', 'highest', 'ratio'))
    for row in rows:
        print('%-16s %8d %8d %8.3f %8.3f %8.3f %8.2f' % (TITLES[row['kind']], row['workers'], row['threads'],
                                                         row['median'], row['lowest'], row['highest'], row['ratio']))
    sys.stdout.flush()


def plot(path, tables, note):
    """A panel a model: bars of the medians, whiskers from the lowest to the highest."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    n = max(map(len, tables.values()))
    figure, axes = plt.subplots(1, len(tables), figsize=(2.6 + 4.2 * len(tables), 1.9 + 0.34 * n), sharey=True,
                                squeeze=False, constrained_layout=True)
    for axis, (model, rows) in zip(axes[0], tables.items()):
        panel(axis, model, rows)
    axes[0][0].invert_yaxis()
    figure.set_constrained_layout_pads(w_pad=0.12, h_pad=0.08)  # inches at the edges
    figure.suptitle('Training over processes: median, lowest to highest\n' + note, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def panel(axis, model, rows):
    """One model's bars."""
    labels, medians = [row['label'] for row in rows], [row['median'] for row in rows]
    errors = [[row['median'] - row['lowest'] for row in rows], [row['highest'] - row['median'] for row in rows]]
    colours = ['tab:orange' if row['kind'] == 'mgpu' else 'tab:blue' for row in rows]
    axis.barh(labels, medians, xerr=errors, color=colours, ecolor='black', capsize=2.5, height=0.7)
    end = max(row['highest'] for row in rows)
    for position, row in enumerate(rows):  # in a column of their own, where neither whiskers nor the line come
        axis.text(1.18 * end, position, '%.2f' % row['median'], ha='right', va='center', fontsize=8)
    axis.set_xlim(0, 1.2 * end)
    axis.axvline(best_plain(rows), color='black', linestyle='--', linewidth=1, zorder=0, label='best plain Keras')
    axis.set_title(model)
    axis.set_xlabel('seconds per %s samples (less is better)' % format(SAMPLES, ','))
    # Above the panel's frame on the right: nothing else is there, whatever the bars are.
    axis.legend(loc='lower right', bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False, fontsize=8)


def processor():
    """The CPU's name."""
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
        for line in file:
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()


def probe(kind, python):
    """Versions of what a kind of contender needs.

    Parameters
    ----------
    kind : str
        A key of `PROBES`.
    python : str
        Its interpreter.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If the interpreter does not start, or lacks something.
    """
    environment = environment_of(Contender(kind, 1, 1))
    try:
        result = subprocess.run([python, '-c', PROBES[kind]], env=environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except OSError as error:
        raise ValueError('the interpreter %s cannot be started: %s' % (python, error.strerror)) from error
    if result.returncode:
        why = (result.stderr.strip().splitlines() or ['exit code %d' % result.returncode])[-1]
        raise ValueError('%s lacks what the %s contenders need: %s' % (python, TITLES[kind], why))
    return result.stdout.strip().splitlines()[-1]


def positive(text):
    """A whole number of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError('%d is less than 1' % value)
    return value


def make_parser():
    """The command line; options without a help text are those of the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument('--ranks', nargs='+', type=positive, default=[1, 2], metavar='R', help='numbers of workers, '
                        'with one thread each (default 1 2)')
    parser.add_argument('--threads', nargs='+', type=positive, default=[1, 2], metavar='T', help='numbers of threads '
                        'of what runs in one worker (default 1 2)')
    parser.add_argument('--rounds', type=positive, default=11, help='epochs of each, in turns (default %(default)s)')
    parser.add_argument('--quick', action='store_true', help='two rounds: to see that it works')
    parser.add_argument('--batch-size', type=positive, default=128, metavar='N', help='samples in the whole batch '
                        '(default %(default)s)')
    parser.add_argument('--torch', metavar='PYTHON', help='an interpreter that has PyTorch, to compare with it')
    parser.add_argument('--tensorflow', metavar='PYTHON', help='one that has TensorFlow')
    parser.add_argument('--json', metavar='FILE', help='write all figures there')
    parser.add_argument('--plot', metavar='FILE', help='draw a picture, e.g. scaling.png')
    parser.add_argument('--worker', choices=sorted(WORK), help=argparse.SUPPRESS)
    parser.add_argument('--torch-rank', type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument('--torch-port', type=int, default=0, help=argparse.SUPPRESS)  # 0: any that is free
    return parser


def check(parser, arguments):
    """End with a message, before anything long is started, if something asked for cannot be had."""
    for name in ('models', 'ranks', 'threads'):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))  # each one once
    if arguments.batch_size > SAMPLES:
        parser.error('--batch-size %d: an epoch has %d samples' % (arguments.batch_size, SAMPLES))
    last = SAMPLES % arguments.batch_size or arguments.batch_size
    if last < max(arguments.ranks):
        parser.error('--batch-size %d --ranks %d: the last batch has %d samples, fewer than workers'
                     % (arguments.batch_size, max(arguments.ranks), last))
    for path in filter(None, (arguments.json, arguments.plot)):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            parser.error('%s: there is no folder for it' % path)
    for module in ['tqdm'] + ['matplotlib'] * bool(arguments.plot):
        if importlib.util.find_spec(module) is None:
            parser.error('%s is not installed: pip install ".[bench]"' % module)
    if shutil.which('mpirun') is None:
        parser.error('mpirun is not on PATH (Debian: apt-get install openmpi-bin python3-mpi4py)')


def versions(parser, arguments):
    """Versions of everything that takes part; ends with a message if something is missing."""
    pythons = {'mgpu': sys.executable, 'torch': arguments.torch, 'tensorflow': arguments.tensorflow}
    try:
        found = [probe(kind, python) for kind, python in pythons.items() if python]
    except ValueError as error:
        parser.error(str(error))
    return ', '.join(['Python ' + platform.python_version(), 'NumPy ' + np.__version__] + found)


def main():
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.worker:
        return WORK[arguments.worker](arguments)
    check(parser, arguments)
    if arguments.quick:
        arguments.rounds = 2
    cores = len(os.sched_getaffinity(0))
    machine = '%s, %s' % (processor(), counted(cores, 'core'))
    environment = dict(machine=machine, cores=cores, versions=versions(parser, arguments), load=os.getloadavg()[0])
    print('%s (load %.1f before the start); %s' % (machine, environment['load'], environment['versions']), flush=True)
    if max(arguments.ranks) > cores:
        print('note: %d workers share %s' % (max(arguments.ranks), counted(cores, 'core')), file=sys.stderr)
    tables = {}
    for model in arguments.models:
        try:
            tables[model] = table(model, measure(model, arguments))
        except WorkerError as error:
            sys.exit('%s: %s' % (model, error))
        except KeyboardInterrupt:
            sys.exit(130)
        print_table(model, tables[model], arguments)
    if arguments.json:
        with open(arguments.json, 'w') as file:
            json.dump(dict(environment, samples=SAMPLES, batch_size=arguments.batch_size, rounds=arguments.rounds,
                           results=sum(tables.values(), [])), file, indent=1)
    if arguments.plot:
        plot(arguments.plot, tables, machine)


if __name__ == '__main__':
    main()
