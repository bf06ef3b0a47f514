"""`theano-mgpu compare`: name the first step at which two runs part, by their ledgers.

A ledger has digests of the weights and the state after every k-th step: of each mgpu.training_function, of each
function with updates under mgpu.enable or "theano-mgpu run", and of each Keras model. "theano-mgpu run --ledger FILE"
and "launch --ledger FILE" write it (flag mgpu.ledger); k is the flag mgpu.ledger_every, 100 by default. Before step k,
steps 1, 2, 4, 8 and so on have digests. Values with equal digests are equal to the bit. The two runs may have another
k, another length, or other devices; steps that only one of them has are not compared. The steps that a run has
repeated after a restart count as they came out last.

The exit code is 0 if all steps that both ledgers have are equal, 1 if the runs part, and 2 if the files cannot be
compared, or have only the values before the first step in common.

examples:
  THEANO_FLAGS=mgpu.ledger_every=1 theano-mgpu run --ledger one.jsonl --gpus 1 train.py
  THEANO_FLAGS=mgpu.ledger_every=1 theano-mgpu run --ledger two.jsonl --gpus 2 train.py
  theano-mgpu compare one.jsonl two.jsonl
"""
from __future__ import annotations

import argparse

from ..checks.ledger_file import differing, first_difference, flat, read
from ..errors import MgpuError
from ..utils.tables import counted, table
from ..utils.values import shortened
from .output import print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument('a', metavar='A', help='a file that --ledger (mgpu.ledger) has written')
    parser.add_argument('b', metavar='B', help='another one')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.set_defaults(works_without_theano=True)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; the exit code is 1 if the runs part."""
    a, b = read(args.a), read(args.b)
    common = [key for key in a.steps if key in b.steps]
    if not common:
        raise MgpuError('%s and %s have no step in common. %s; %s' % (a.path, b.path, _contents(a), _contents(b)))
    difference = first_difference(a, b, common)
    compared = sum(step > 0 for _, step in common)
    if difference is None and not compared:
        raise MgpuError('only the values before the first step are in both ledgers, and are equal: no step was '
                        'compared. %s; %s. Run both again with mgpu.ledger_every=1' % (_contents(a), _contents(b)))
    settings = differing(flat(a.starts[-1]), flat(b.starts[-1]))
    if args.json:
        print_json({'equal': difference is None, 'compared': compared,
                    'difference': difference and difference._asdict(), 'settings': settings})
    else:
        verdict = _about_difference(difference) if difference else _about_equal(a, b, common)
        print('\n'.join([*_summary(a), *_summary(b), '', *verdict]))
        if settings:
            print('\n' + table([['SETTING', 'A', 'B'], *map(list, settings)]))
    return int(difference is not None)


def _contents(ledger):
    """Return the functions of a ledger with their last steps, as a text."""
    functions = ['%s up to step %d' % last for last in _last_steps(ledger.steps).items()]
    return '%s has %s' % (ledger.path, ', '.join(functions) or 'no step')


def _last_steps(steps):
    """Return the last step of each function."""
    last: dict[str, int] = {}
    for of, step in steps:
        last[of] = max(step, last.get(of, 0))
    return last


def _summary(ledger):
    """Return the lines about one ledger."""
    every = ', '.join(dict.fromkeys(str(start['every']) for start in ledger.starts))
    lines = ['%s (every %s)' % (_contents(ledger), every)]
    restarts = len(ledger.starts) - 1
    if restarts:
        lines.append('  started again: %s' % counted(restarts, 'time'))
    for of, steps, different in ledger.repeated:
        came_out = 'otherwise: %s' % shortened(different) if different else 'the same'
        lines.append('  repeated by %s: %s, which came out %s' % (of, shortened(steps), came_out))
    if ledger.is_cut:
        lines.append('  its last line is incomplete, as after a kill, and does not count')
    return lines


def _about_equal(a, b, common):
    """Return the lines about ledgers without a difference: the steps that were compared, and the others."""
    last, *every_last = map(_last_steps, (common, a.steps, b.steps))
    lines = ['equal: %s of both have the same bits' % counted(sum(step > 0 for _, step in common), 'step')]
    for ledger, own in zip((a, b), every_last):
        more = ['%s after step %d' % (of, last[of]) if of in last else of
                for of, step in own.items() if step > last.get(of, -1)]
        if more:
            lines.append('not compared, since it is in %s alone: %s' % (ledger.path, shortened(more)))
    return lines


def _about_difference(difference):
    """Return the lines about the step at which two runs part."""
    of, step, equal, variables, n_variables = difference
    lines = ['the runs part at step %d of %s: %s is the first variable that differs' % (step, of, variables[0]),
             '%d of %s differ there: %s' % (len(variables), counted(n_variables, 'variable'), shortened(variables))]
    if equal is None:
        return lines + ['no step before it is equal: the runs began with other values, such as other seeds' if not step
                        else 'no earlier step is in both ledgers']
    return lines + ['step %d is equal%s' % (equal, '' if step == equal + 1 else
                                            '. For the steps between, run both with mgpu.ledger_every=1')]
