"""A comparison of several ways of doing one thing: all take turns, a short block each, for a number of rounds.

Other programs slow a machine down for seconds at a time. Within a round all sides meet the same machine, so ratios are
taken within rounds, and their median over the rounds is reported.
"""
import argparse
import contextlib
import json
import time
from collections import namedtuple

import numpy as np

WARM_UP = 3  # calls of each side before the first that counts


class Spread(namedtuple('Spread', 'median lowest highest')):
    """Median, lowest and highest of some values.

    Examples
    --------
    >>> print(spread([3.0, 1.0, 5.0]))
    3.000 (1.000 to 5.000)
    """

    __slots__ = ()

    def __str__(self):
        return '%.3f (%.3f to %.3f)' % self


def spread(values):
    """Return the Spread of a sequence of float.

    Examples
    --------
    >>> spread([3.0, 1.0, 5.0])
    Spread(median=3.0, lowest=1.0, highest=5.0)
    """
    return Spread(float(np.median(values)), float(min(values)), float(max(values)))


def ratio(ours, theirs):
    """Return the Spread of the ratios ours / theirs within each round.

    Parameters
    ----------
    ours, theirs : sequence of float
        One value a round.

    Examples
    --------
    >>> ratio([2.0, 6.0, 3.0], [1.0, 2.0, 3.0])
    Spread(median=2.0, lowest=1.0, highest=3.0)
    """
    return spread([a / b for a, b in zip(ours, theirs)])


def make_parser(doc, rounds):
    """Return an ArgumentParser that shows a docstring as it is, with an option ``--rounds``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=rounds, help='rounds that count (default %(default)s)')
    return parser


def order(sides, number):
    """Return the order of the sides in a round: a later one begins in each pair of rounds; odd rounds run backwards.

    Parameters
    ----------
    sides : sequence
    number : int
        Of the round, from 0.

    Examples
    --------
    >>> [order('abc', number) for number in range(4)]
    ['abc', 'cba', 'bca', 'acb']
    >>> [order('ab', number) for number in range(4)]
    ['ab', 'ba', 'ba', 'ab']
    """
    start = number // 2 % len(sides)
    return (sides[start:] + sides[:start])[::-1 if number % 2 else 1]


def take_turns(sides, rounds, title=None, bar=None):
    """Call each side once in each round.

    Parameters
    ----------
    sides : dict of str to callable
        ``side()`` does the measured work, and returns its measurement.
    rounds : int
    title : str, optional
        Show a progress bar of this name on a terminal; it needs tqdm.
    bar : progress bar, optional
        ``bar.update(1)`` is called after each turn.

    Returns
    -------
    dict of str to list
        The measurements of each side, one entry a round.

    Examples
    --------
    >>> take_turns({'a': lambda: 1, 'b': lambda: 2}, rounds=3)
    {'a': [1, 1, 1], 'b': [2, 2, 2]}
    """
    measured = {name: [] for name in sides}
    with _titled(title, rounds * len(sides)) if title else contextlib.nullcontext(bar) as shown:
        for number in range(rounds):
            for name in order(list(sides), number):
                measured[name].append(sides[name]())
                if shown is not None:
                    shown.update(1)
    return measured


def _titled(title, turns):
    from tqdm import tqdm
    return tqdm(total=turns, desc=title, unit=' turns', disable=None, leave=False)


def seconds(call, repeats=1, clock=time.perf_counter):
    """Return the seconds that one call takes, on a clock: the mean of `repeats` calls in a row."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def compare(ours, theirs, title, rounds=11, block=1.0):
    """Time two callables in turns.

    Parameters
    ----------
    ours, theirs : callable
    title : str
    rounds : int
    block : float
        Seconds that a turn takes, about.

    Returns
    -------
    dict
        title; ours, theirs: median seconds of a call; ratio, lowest, highest: of ours / theirs within a round;
        rounds; calls_per_block.
    """
    for side in (ours, theirs):
        seconds(side, WARM_UP)
    repeats = max(1, int(block / seconds(theirs, WARM_UP)))
    measured = take_turns({'ours': lambda: seconds(ours, repeats), 'theirs': lambda: seconds(theirs, repeats)}, rounds,
                       title)
    ratios = ratio(measured['ours'], measured['theirs'])
    return dict(title=title, ours=float(np.median(measured['ours'])), theirs=float(np.median(measured['theirs'])),
                ratio=ratios.median, lowest=ratios.lowest, highest=ratios.highest, rounds=rounds,
                calls_per_block=repeats)


def show(row):
    """Print a result of `compare` on one line, in milliseconds."""
    print('%-62s %8.3f ms / %8.3f ms = %s' % (row['title'], 1e3 * row['ours'], 1e3 * row['theirs'],
                                              Spread(row['ratio'], row['lowest'], row['highest'])), flush=True)


def show_all(rows, path):
    """Show rows of `compare` as they come, and write them to a file, see `write_json`."""
    shown = []
    for row in rows:
        shown.append(row)
        show(row)
    write_json(shown, path)


def write_json(rows, path):
    """Write the results of a benchmark to the file that ``--json`` names, if it names one."""
    if path:
        with open(path, 'w') as file:
            json.dump(rows, file, indent=1)


def largest_difference(ours, theirs):
    """Return the largest difference of two lists of shared variables, each as a part of its largest value."""
    values = [(one.get_value(), other.get_value()) for one, other in zip(ours, theirs)]
    return max(float(abs(one - other).max() / abs(other).max()) for one, other in values)
