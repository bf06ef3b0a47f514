"""What replicas have, put together: over those of this process, then over the ranks."""
import numpy as np

from ..collectives import all_reduce
from ..exchange import added

REDUCE = {'sum': np.add, 'max': np.maximum, 'min': np.minimum, 'prod': np.multiply}


def exchanged(parts, hows, lengths, ranks):
    """The whole of each value, the same on every rank.

    Parameters
    ----------
    parts : list of list of ndarray
        For each value, what the replicas of this process have, in the order of their samples.
    hows : list of (str or (str, int))
        'sum', 'max', 'min', 'prod', or ``('gather', axis)``.
    lengths : list of int
        Samples of each rank. What one without samples has does not count.
    ranks : Ranks

    Returns
    -------
    list of ndarray
    """
    values = [_of_process(each, how) for each, how in zip(parts, hows)]
    if ranks.size == 1:
        return values
    sums = [i for i, how in enumerate(hows) if how == 'sum']
    counts = lengths[ranks.rank] > 0
    totals = added(ranks, [values[i] if counts else np.zeros_like(values[i]) for i in sums])
    for i, total in zip(sums, totals):
        values[i] = total
    for i, how in enumerate(hows):
        if how != 'sum':
            values[i] = _gathered(values[i], how, lengths, ranks)
    return values


def _of_process(parts, how):
    if isinstance(how, tuple):
        return parts[0] if len(parts) == 1 else np.concatenate(parts, how[1])
    if len(parts) == 1:
        return parts[0]
    if how == 'sum' and parts[0].dtype.kind == 'f':
        return all_reduce(parts, [1.0] * len(parts))
    return np.asarray(REDUCE[how].reduce(parts), parts[0].dtype)


def _gathered(value, how, lengths, ranks):
    if isinstance(how, tuple):
        rows = np.ascontiguousarray(np.moveaxis(value, how[1], 0))
        each = rows.shape[0] // max(1, lengths[ranks.rank])  # a sample may own several rows
        return np.moveaxis(ranks.gather(rows, [each * length for length in lengths]), 0, how[1])
    every = ranks.gather(np.ascontiguousarray(value[np.newaxis]), [int(length > 0) for length in lengths])
    return np.asarray(REDUCE[how].reduce(every), value.dtype)
