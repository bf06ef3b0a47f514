"""The command lines of scaling.py and predict.py: their options, the description of the machine, their files."""
import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys

from theano_mgpu.cli.bench.worker import WorkerError
from theano_mgpu.utils.tables import counted

import numpy as np
from contest import environment_of


def processor():
    """The CPU's name."""
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
        for line in file:
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def probe(python, code, name):
    """Run a piece of Python in the environment of a worker, and return what it prints, such as versions.

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


def positive(text):
    """A whole number of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError('%d is less than 1' % value)
    return value


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


def announce(found, workers):
    """Print the machine and the versions that take part.

    Parameters
    ----------
    found : list of str
        Versions.
    workers : int
        The most workers that run at a time.

    Returns
    -------
    dict
        The same, for the file of figures.
    """
    versions = ', '.join(['Python ' + platform.python_version(), 'NumPy ' + np.__version__] + found)
    machine = '%s, %s' % (processor(), counted(cores(), 'core'))
    environment = dict(machine=machine, cores=cores(), versions=versions, load=os.getloadavg()[0])
    print('%s (load %.1f before the start); %s' % (machine, environment['load'], versions), flush=True)
    if workers > cores():
        print('note: %d workers share %s' % (workers, counted(cores(), 'core')), file=sys.stderr)
    return environment


def tables_of(models, compete, show):
    """The rows of each model; ends with a message if a worker fails.

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
    with open(path, 'w') as file:
        json.dump(dict(more, results=sum(tables.values(), [])), file, indent=1)


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
    """Bars of the medians, whiskers from the lowest to the highest.

    Parameters
    ----------
    axis : matplotlib.axes.Axes
    rows : list of dict
    ours : callable
        Whether a row is this package's.
    number : callable
        The text of a median.
    line, name : float, str
        Where a dashed line goes, and what it is.
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
