"""The contests of scaling.py and predict.py: workers, which take turns, and options, tables and pictures."""
import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time

from theano_mgpu.cli.bench import CORES
from theano_mgpu.cli.shared_arguments import positive
from theano_mgpu.devices import discovery
from theano_mgpu.utils.tables import counted

import numpy as np
import turns
from worker import Worker, WorkerError

SETTLE = 0.1      # seconds before each epoch: idle threads of OpenBLAS and OpenMP spin for some milliseconds
PATIENCE = 900    # seconds that an answer may take, compilation included


def launch(ranks, script, args):
    """Return the command that runs a script of this project as a number of MPI ranks."""
    return [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(ranks), script] + args


def environment_of(threads):
    """Return the environment of a worker: its threads, the CPU, float32."""
    environment = dict(os.environ, KERAS_BACKEND='theano', CUDA_VISIBLE_DEVICES='', TF_CPP_MIN_LOG_LEVEL='2')
    flags = [flag for flag in (os.environ.get('THEANO_FLAGS'), 'device=cpu,floatX=float32') if flag]
    environment['THEANO_FLAGS'] = ','.join(flags)  # the last value of a flag counts
    environment.setdefault('GLOO_SOCKET_IFNAME', 'lo')  # the host's own name may not resolve
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
        environment[name] = str(threads)
    return environment


def start_worker(contender, command):
    """Start a contender's Worker.

    It prints a line ``ready`` when it is, and then the seconds of an epoch for each line ``go`` of its stdin.

    Parameters
    ----------
    contender : Contender
        With a `label` and a number of `threads`.
    command : list of str

    Raises
    ------
    WorkerError
        If it ends, or takes longer than `PATIENCE`, before it is ready.
    """
    worker = Worker('the worker "%s"' % contender.label, command, environment_of(contender.threads), PATIENCE)
    try:
        worker.answer(lambda line: line == 'ready')
    except BaseException:
        worker.kill()
        raise
    return worker


def next_number(worker):
    """Return the next number that a worker prints."""
    return float(worker.answer(is_number))


def epoch(worker):
    """Run an epoch of a worker; return its seconds."""
    time.sleep(SETTLE)
    worker.send('go')
    return next_number(worker)


def is_number(text):
    """Return whether a line is a number.

    Examples
    --------
    >>> is_number('0.25'), is_number('WARNING: 0.25')
    (True, False)
    """
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def started(stack, contenders, start, title):
    """Start the workers of all contenders; an ExitStack ends them.

    Parameters
    ----------
    stack : contextlib.ExitStack
    contenders : list
    start : callable
        Starts the Worker of a contender.
    title : str
        Of the progress bar.

    Returns
    -------
    dict of contender to Worker
    """
    # One after the other: together they would wait for each other at the lock of Theano's compilation folder.
    from tqdm import tqdm  # not at the top: `check_common` says how to install it
    bar = tqdm(contenders, desc='%s: starting' % title, unit=' contenders', disable=None, leave=False)
    return {contender: stack.enter_context(start(contender)) for contender in bar}


def epochs_in_turns(workers, rounds, title):
    """Return the seconds of each contender's epochs, a list with one entry a round.

    Parameters
    ----------
    workers : dict of contender to Worker
    rounds : int
    title : str
        Of the progress bar.

    Returns
    -------
    dict of contender to list of float
    """
    return turns.take_turns({contender: lambda worker=worker: epoch(worker) for contender, worker in workers.items()},
                            rounds, title)


def probe(python, code, name):
    """Run a piece of Python in the environment of a worker, and return its output, such as versions.

    Parameters
    ----------
    python : str
        Its interpreter.
    code : str
    name : str
        Who needs it.

    Returns
    -------
    str
        The last line.

    Raises
    ------
    ValueError
        If the interpreter does not start, or lacks something.
    """
    try:
        result = subprocess.run([python, '-c', code], env=environment_of(1), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except OSError as error:
        raise ValueError('the interpreter %s cannot be started: %s' % (python, error.strerror)) from error
    if result.returncode:
        why = (result.stderr.strip().splitlines() or ['exit code %d' % result.returncode])[-1]
        raise ValueError('%s lacks what the %s contenders need: %s' % (python, name, why))
    return result.stdout.strip().splitlines()[-1]


def add_options(parser, models, picture):
    """Add the options that all contests share."""
    parser.add_argument('--models', nargs='+', choices=sorted(models), default=sorted(models))
    parser.add_argument('--rounds', type=positive, default=11, help='epochs of each, in turns (default %(default)s)')
    parser.add_argument('--quick', action='store_true', help='two rounds: to see that it works')
    parser.add_argument('--json', metavar='FILE', help='write all figures there')
    parser.add_argument('--plot', metavar='FILE', help='draw a picture, e.g. ' + picture)


def check_common(parser, arguments):
    """Apply --quick; end with a message if a folder, a module or mpirun is missing."""
    if arguments.quick:
        arguments.rounds = 2
    for path in filter(None, (arguments.json, arguments.plot)):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            parser.error('%s: there is no folder for it' % path)
    for module in ['tqdm'] + ['matplotlib'] * bool(arguments.plot):
        if importlib.util.find_spec(module) is None:
            parser.error('%s is not installed: pip install ".[bench]"' % module)
    if shutil.which('mpirun') is None:
        parser.error('mpirun is not on PATH (Debian: apt-get install openmpi-bin python3-mpi4py)')


def announce(versions, workers):
    """Print the machine and the versions that take part.

    Parameters
    ----------
    versions : list of str
        Of the packages that take part.
    workers : int
        The most workers that run at a time.

    Returns
    -------
    dict
        The same, for the file of figures.
    """
    versions = ', '.join(['Python ' + platform.python_version(), 'NumPy ' + np.__version__, *versions])
    machine = '%s, %s' % (discovery.status('cpu', None).name, counted(CORES, 'core'))
    environment = dict(machine=machine, cores=CORES, versions=versions, load=os.getloadavg()[0])
    print('%s (load %.1f before the start); %s' % (machine, environment['load'], versions), flush=True)
    if workers > CORES:
        print('note: %d workers share %s' % (workers, counted(CORES, 'core')), file=sys.stderr)
    return environment


def tables_of(models, compete, show):
    """Return the rows of each model; end with a message if a worker fails.

    Parameters
    ----------
    models : list of str
    compete : callable
        The rows of one.
    show : callable
        Prints them.

    Returns
    -------
    dict of str to list of dict
    """
    tables = {}
    for model in models:
        try:
            tables[model] = compete(model)
        except WorkerError as error:
            sys.exit('%s: %s' % (model, error))
        except KeyboardInterrupt:
            sys.exit(130)
        show(model, tables[model])
        sys.stdout.flush()
    return tables


def keep(arguments, tables, environment, title, panel, **more):
    """Write the figures, and draw them, where --json and --plot ask for it; see `write` and `draw`."""
    if arguments.json:
        write(arguments.json, tables, batch_size=arguments.batch_size, rounds=arguments.rounds, **environment, **more)
    if arguments.plot:
        draw(arguments.plot, tables, '%s: median, lowest to highest\n%s' % (title, environment['machine']), panel)


def write(path, tables, **more):
    """Write all rows of all models, and further entries, as JSON."""
    turns.write_json(dict(more, results=sum(tables.values(), [])), path)


def draw(path, tables, title, panel):
    """Draw a picture with one panel for each model.

    Parameters
    ----------
    path : str
    tables : dict of str to list of dict
        Rows of each model.
    title : str
    panel : callable
        Draws one, given a matplotlib Axes, the model and its rows.
    """
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
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bars(axis, rows, ours, number, line, name):
    """Draw bars of the medians, with whiskers from the lowest to the highest.

    Parameters
    ----------
    axis : matplotlib.axes.Axes
    rows : list of dict
    ours : callable
        Whether a row is this package's.
    number : callable
        The text of a median.
    line, name : float, str
        The position of a dashed line, and its label.
    """
    labels, medians = [row['label'] for row in rows], [row['median'] for row in rows]
    errors = [[row['median'] - row['lowest'] for row in rows], [row['highest'] - row['median'] for row in rows]]
    colours = ['tab:orange' if ours(row) else 'tab:blue' for row in rows]
    axis.barh(labels, medians, xerr=errors, color=colours, ecolor='black', capsize=2.5, height=0.7)
    end = max(row['highest'] for row in rows)
    for position, median in enumerate(medians):  # in a column of their own, where neither whiskers nor the line come
        axis.text(1.18 * end, position, number(median), ha='right', va='center', fontsize=8)
    axis.set_xlim(0, 1.2 * end)
    axis.axvline(line, color='black', linestyle='--', linewidth=1, zorder=0, label=name)
    # Above the panel's frame on the right: nothing else is there, whatever the bars are.
    axis.legend(loc='lower right', bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False, fontsize=8)
