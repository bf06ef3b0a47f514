"""Divide what a stage computes into buckets, so that the gradients of one are exchanged while the next is computed."""
from typing import Dict, List, Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..graphs.output_order import by_depth

LEAST = 1 << 20  # bytes of gradients: less is exchanged about as fast together with the next ones
MOST = 8         # buckets: each costs a call of a compiled function, and a handshake of the ranks


def buckets(outputs: Sequence[theano.Variable], sizes: Mapping[theano.Variable, float]) -> List[List[theano.Variable]]:
    """Divide the outputs of a stage, in the order in which they are computed.

    Parameters
    ----------
    outputs : list of theano.Variable
    sizes : dict of theano.Variable to float
        Bytes of those that are exchanged.

    Returns
    -------
    list of list of theano.Variable
        Each but for the last one has at least `LEAST` bytes; at most `MOST` lists.

    Notes
    -----
    DistributedDataParallel of PyTorch does the same (Li et al., 2020), in the reverse order of the parameters.
    """
    limit = max(LEAST, sum(sizes.get(output, 0) for output in outputs) / MOST)
    found: List[List[theano.Variable]] = [[]]
    filled = 0.0
    for output in by_depth({output: output for output in outputs}):
        if filled >= limit and len(found) < MOST:
            found.append([])
            filled = 0.0
        found[-1].append(output)
        filled += sizes.get(output, 0)
    return found


def most_buckets(n_bytes: float) -> int:
    """The most buckets of gradients with `n_bytes` in all.

    Examples
    --------
    >>> most_buckets(LEAST), most_buckets(3.5 * LEAST), most_buckets(100 * LEAST)
    (1, 3, 8)
    """
    return int(min(MOST, max(1, n_bytes // LEAST)))


def bytes_of_gradients(exchanges: Sequence, params: Sequence[SharedVariable],
                       new: Dict[SharedVariable, theano.Variable]) -> Dict[theano.Variable, float]:
    """About how many bytes each of the sums of gradients has, by its source.

    Parameters
    ----------
    exchanges : list of Exchange
    params : list of SharedVariable
        What is trained.
    new : dict of SharedVariable to theano.Variable
        Their new values. A sum has the size of the parameters that it changes, on average, of those with as many axes:
        a norm of all gradients makes each new value depend on each gradient.
    """
    made = {param: set(ancestors([new[param]])) for param in params if param in new}
    found = {}
    for exchange in exchanges:
        changed = [param.container.storage[0] for param, needs in made.items()
                   if exchange.variable in needs and param.ndim == exchange.variable.ndim]
        if exchange.how == 'sum' and changed:
            found[exchange.source] = sum(value.size * value.dtype.itemsize for value in changed) / len(changed)
    return found
