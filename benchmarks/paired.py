"""Two ways of one thing, in turns: the ratio round by round."""
import time

import numpy as np
from tqdm import tqdm


def seconds(step, repeats):
    """Seconds of a call, the mean of some."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def compare(ours, theirs, title, rounds=11, block=1.0):
    """Ratio ours/theirs round by round; the order within a round alternates.

    Parameters
    ----------
    ours, theirs : callable
    title : str
    rounds : int
    block : float
        Seconds that one side of a round takes.

    Returns
    -------
    dict
        title; ours, theirs: median seconds of a call; ratio: the median of the rounds' own, lowest, highest.
    """
    for step in (ours, theirs):
        seconds(step, 3)
    repeats = max(1, int(block / seconds(theirs, 3)))
    found = []
    for number in tqdm(range(rounds), desc=title, disable=None, leave=False):
        sides = [(0, ours), (1, theirs)][::1 if number % 2 else -1]
        times = {side: seconds(step, repeats) for side, step in sides}
        found.append((times[0], times[1]))
    ratios = [a / b for a, b in found]
    return dict(title=title, ours=float(np.median([a for a, _ in found])),
                theirs=float(np.median([b for _, b in found])), ratio=float(np.median(ratios)),
                lowest=min(ratios), highest=max(ratios), rounds=len(found), calls_per_block=repeats)


def show(row):
    """One line."""
    print('%-62s %8.3f ms / %8.3f ms = %.3f (%.3f to %.3f)'
          % (row['title'], 1e3 * row['ours'], 1e3 * row['theirs'], row['ratio'], row['lowest'], row['highest']),
          flush=True)
