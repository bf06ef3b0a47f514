"""`theano-mgpu report`: check and measure this machine, and write a report that can be sent in.

The steps: the machine, and the links of its cards; doctor; copies from, to and between cards; sums
by NCCL, by size; an exchange that is aborted; whether several devices give the weights of one; how models scale over
contexts and over processes. Without a GPU, the cores of the CPU are the devices. Each step has a process of its own
and a limit, and all have ten minutes: one that hangs ends with the stacks of its threads, and the next one follows. The
file is complete after each step, also if the report is interrupted. A table is at its top. A step may take
twice its limit where the later ones leave the time.

Names of users, hosts and folders are left out. Please read the file, and post it in an issue of the repository, also
if all is well: few machines with several GPUs have been seen.

examples:
  theano-mgpu report                                  write theano-mgpu-report.txt, in at most ten minutes
  theano-mgpu report big.txt --only machine,nccl      two of the steps, to another file
  theano-mgpu report --contexts 'dev0->cuda1;dev1->cuda2'
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import textwrap
import time
from typing import Mapping, NamedTuple, Sequence

import theano_mgpu

from ...devices.context_map import Context, describe, parse_context_map
from ...errors import MgpuError
from ...utils import mpi_environment
from ...utils.files import check_folder, check_writable, whole_text
from ...utils.flag_text import environment_flags, set_environment_flags
from ...utils.tables import counted, table
from .. import limited
from ..output import note
from ..shared_arguments import add_contexts
from .names import without_names

FILE = 'theano-mgpu-report.txt'
MARK = '= '    # before the line of a probe that is for the table
SECONDS = 600  # of all steps
LISTING = 40   # seconds to list the devices
MOST = 400     # lines of a step
LONGEST, WIDTH = 200, 76  # characters of the last line of a step, and of a line of the table
POST = ('Please read %s, and post it in an issue of the repository of theano_mgpu ("A report of a machine"), also if '
        'all is well.')
STAGED = 'nccl-staged'  # with copies through the host alone, which is what its remedy does
VARIABLES = re.compile('(CUDA|NCCL|OMP|OPENBLAS|MKL|THEANO|MGPU|KERAS|NVIDIA|UCX|OMPI_MCA|SLURM_(GPU|CPU|N[TN]))')
TITLES = ['STEP', 'RESULT', 'SECONDS', 'FOUND']
OK, FAILED, LEFT_OUT, RUNNING, ENDED = 'ok', 'FAILED', 'left out', 'running', 'TIME OUT'


class Step(NamedTuple):
    """A step: a command, its limit in seconds, the cards that it needs, and its variables and flags of Theano."""

    command: Sequence[str]
    seconds: int
    cards: int = 0
    variables: dict[str, str] = {}
    flags: str = ''


def probe(*words: str) -> Sequence[str]:
    """Return the command of a function of `probes` with some arguments."""
    return [sys.executable, '-m', __name__, *words]


OF_NCCL = {'NCCL_DEBUG': 'INFO'}
STEPS = {
    'machine': Step(probe('machine'), 40), 'doctor': Step(probe('doctor'), 200), 'copies': Step(probe('copies'), 60, 1),
    'nccl': Step(probe('nccl'), 80, 2, OF_NCCL),
    STAGED: Step(probe('nccl'), 80, 2, {**OF_NCCL, 'NCCL_P2P_DISABLE': '1'}),
    'abort': Step(probe('abort'), 100, 2), 'equal': Step(probe('equal'), 200),
    'mlp': Step(probe('scaling', 'mlp'), 150), 'cnn': Step(probe('scaling', 'cnn'), 150),
    'lstm': Step(probe('scaling', 'lstm'), 150),
    'resnet50': Step(probe('scaling', 'resnet50'), 200, 1),
    'cnn-without-cudnn': Step(probe('scaling', 'cnn'), 100, 1, flags='dnn.enabled=False'),
    'mlp-with-tf32': Step(probe('scaling', 'mlp'), 100, 1, flags='mgpu.tf32=True')}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('file', nargs='?', default=FILE, metavar='FILE',
                        help='the file to write; one that exists is replaced (default: %(default)s)')
    add_contexts(parser)
    parser.add_argument('--only', type=names_of_steps, default=list(STEPS), metavar='STEP,...',
                        help='only these steps, of ' + ', '.join(STEPS))


def names_of_steps(text: str) -> list[str]:
    """Return the steps that an option names; raise an error of its parser if there is another one."""
    names = text.split(',')
    for name in names:
        if name not in STEPS:
            raise argparse.ArgumentTypeError('there is no step %r: give some of %s, with commas between them'
                                             % (name, ', '.join(STEPS)))
    return names


def check(args: argparse.Namespace) -> None:
    """Raise a MgpuError for a rank, or if the file cannot be written."""
    if mpi_environment.size() > 1:
        raise MgpuError('report starts its own processes: run it without launch')
    check_folder(args.file)
    try:
        check_writable(args.file)
    except OSError as error:
        raise MgpuError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    """Run the steps, and write the file after each; return 1 if one has failed, 130 after Ctrl-C, else 0."""
    listed = limited.run(probe('devices', json.dumps(args.contexts)), LISTING)  # a driver may hang already there
    last = found(listed, LISTING)
    if listed.code:
        raise MgpuError(last.partition('Error: ')[2] or last)
    names = [name for name in args.only if listed.code == 0 or name in ('machine', 'doctor')]
    if listed.code is None:
        note('the devices cannot be listed within %d s: the driver hangs' % LISTING)
    contexts = parse_context_map(last) if listed.code == 0 else []
    return take_steps({name: STEPS[name] for name in names}, contexts, args.file)


def take_steps(steps: Mapping[str, Step], contexts: Sequence[Context], path: str, seconds: float = SECONDS) -> int:
    """Run steps on contexts, all within some seconds, and write a file; return the exit code of `run`."""
    set_environment_flags({'floatX': 'float32', **environment_flags(), 'contexts': describe(contexts)})
    os.environ['KERAS_BACKEND'] = 'theano'
    report = ReportFile(path, describe(contexts))
    n_cards = len({context.device for context in contexts if context.kind == 'cuda'})
    for number in signal.SIGTERM, signal.SIGHUP:  # a closed connection, a scheduler
        signal.signal(number, signal.default_int_handler)
    later = sum(step.seconds for step in steps.values() if step.cards <= n_cards)
    try:
        for name, step in steps.items():
            left = seconds - report.seconds()
            later -= step.seconds * (step.cards <= n_cards)
            why_not = ('there is no CUDA device' if n_cards < min(1, step.cards) else
                       'it needs several cards, and all contexts share one' if n_cards < step.cards else
                       'NCCL works as it is' if name == STAGED and report.results.get('nccl') == OK else
                       'the %d s are over' % seconds if left < min(20, step.seconds) else '')
            report.take(name, step, min(max(step.seconds, min(left - later, 2 * step.seconds)), left), why_not)
    except KeyboardInterrupt:
        report.write()
        note('interrupted; %s has what was found so far' % path)
        return 130
    bad = [name for name, result in report.results.items() if result in (FAILED, ENDED)]
    if bad:
        print('%d of %s did not succeed: %s.' % (len(bad), counted(len(steps), 'step'), ', '.join(bad)))
    print(POST % path)
    return int(bool(bad))


class ReportFile:
    """The file of a report: a head, a table with a row for each step, and the output of each."""

    def __init__(self, path: str, contexts: str) -> None:
        self._path, self._began = path, time.monotonic()
        self._head = 'theano_mgpu %s, Python %s, %s, %s\ncontexts %s' % (
            theano_mgpu.__version__, platform.python_version(), platform.platform(), time.strftime('%Y-%m-%d'),
            '\n'.join([contexts, *own_variables()]))
        self._rows: list[list[str]] = []
        self._texts: list[str] = []
        print(without_names(self._head) + '\n\n' + _in_columns(TITLES))

    @property
    def results(self) -> dict[str, str]:
        """The result of each step so far."""
        return {name: result for name, result, *_ in self._rows}

    def seconds(self) -> float:
        """Return how long the report has taken so far."""
        return time.monotonic() - self._began

    def take(self, name: str, step: Step, limit: float, why_not: str = '') -> None:
        """Run a step, or leave it out for a reason; show its row, and write the file before and after it."""
        self._rows.append([name, LEFT_OUT, '', why_not])
        self._texts.append('')
        if not why_not:
            self._rows[-1][1:] = RUNNING, '', 'at most %d s' % limit
            self.write()
            if sys.stdout.isatty():
                print('%s: %s, at most %d s' % (name, RUNNING, limit), end='\r', flush=True)
            began, flags = time.monotonic(), ','.join(filter(None, [os.environ['THEANO_FLAGS'], step.flags]))
            try:
                ended = limited.run(step.command, limit, {**step.variables, 'THEANO_FLAGS': flags})
            except KeyboardInterrupt:
                self._rows[-1][1:] = LEFT_OUT, '%.0f' % (time.monotonic() - began), 'interrupted'
                raise
            stopped = '= stopped after %.0f s; the stacks of its threads:\n' % limit * (ended.code is None)
            lines = (ended.text + stopped + ended.stacks).splitlines(True)
            cut = ['... %d lines are left out\n' % (len(lines) - MOST)] * (len(lines) > MOST)
            self._texts[-1] = ''.join(['\n=== %s\n' % name, *lines[:MOST // 2], *cut, *lines[MOST // 2:][-MOST // 2:]])
            result = OK if ended.code == 0 else ENDED if ended.code is None else FAILED
            self._rows[-1][1:] = result, '%.0f' % (time.monotonic() - began), found(ended, limit)
        self.write()
        print('\x1b[K' * sys.stdout.isatty() + '\n'.join(map(_in_columns, _wrapped(self._rows[-1]))), flush=True)

    def write(self) -> None:
        """Write the file as far as it is known."""
        rows = [cells for row in self._rows for cells in _wrapped(row)]
        with whole_text(self._path) as file:
            file.write(without_names('%s\n\n%s\n%s' % (self._head, table([TITLES, *rows], {2}), ''.join(self._texts))))


def own_variables() -> list[str]:
    """Return the variables of this process that matter, NAME=VALUE, as the user has set them."""
    try:
        with open('/proc/self/environ', errors='replace') as file:  # before this package has changed any
            return sorted(each for each in file.read().split('\0') if VARIABLES.match(each))
    except OSError:
        return []


def _in_columns(cells):
    return '%-*s  %-8s  %7s  %s' % (max(map(len, STEPS)), *cells)


def _wrapped(row):
    """Return a row as rows of which the last cell is no wider than a terminal has room for."""
    first, *rest = textwrap.wrap(without_names(row[-1]), WIDTH, break_long_words=False) or ['']
    return [[*row[:-1], first], *[[''] * len(row[:-1]) + [each] for each in rest]]


def found(ended: limited.Ended, limit: float) -> str:
    """Return the finding of a step, for the table: its last line, or the error that has ended it, or its limit."""
    last = ''.join([line for line in ended.text.splitlines() if line.strip()][-1:])
    if last.startswith(MARK) or ended.code == 0:
        return last[len(MARK) * last.startswith(MARK):]
    how = 'not done after %.0f s' % limit if ended.code is None else 'exit code %d' % ended.code
    again = '. What is compiled is kept: try this step again, by --only' * (ended.code is None and 'compil' in last)
    return '%s; the last line: %s%s' % (how, last[:LONGEST], again)
