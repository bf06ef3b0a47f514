"""Buckets of the outputs of a stage: the gradients of one bucket are exchanged while the next one is computed."""
from __future__ import annotations

from typing import Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..graph.analysis import SUM
from ..graph.graph import by_depth, bytes_of_shared, n_axes
from ..graph.partition import Program

LEAST = 1 << 20  # bytes of gradients: less is exchanged about as fast together with the next ones
MOST = 8         # buckets: each costs a call of a compiled function, and a handshake of the ranks


def buckets(outputs: Sequence[theano.Variable], sizes: Mapping[theano.Variable, float]) -> list[list[theano.Variable]]:
    """Divide the outputs of a stage, in the order in which they are computed, by the bytes of those that are exchanged.

    Each list but for the last one has at least `LEAST` bytes. DistributedDataParallel of PyTorch does the same (Li et
    al., 2020), in the reverse order of the parameters.
    """
    limit = max(LEAST, sum(sizes.get(output, 0) for output in outputs) / MOST)
    filled: list[list[theano.Variable]] = [[]]
    n_bytes = 0.0
    for output in by_depth({output: output for output in outputs}):
        if n_bytes >= limit and len(filled) < MOST:
            filled.append([])
            n_bytes = 0.0
        filled[-1].append(output)
        n_bytes += sizes.get(output, 0)
    return filled


def bytes_of_gradients(program: Program, params: Sequence[SharedVariable]) -> dict[theano.Variable, float]:
    """Return about how many bytes each of a program's sums of gradients of trained parameters has, by its source.

    A sum has the size of the trained parameters that it changes, on average, of those with as many axes: a norm of all
    gradients makes each new value depend on each gradient.
    """
    new = dict(zip(program.updated, program.outputs[len(program.outputs) - len(program.updated):]))
    read_for = {param: set(ancestors([new[param].variable])) for param in params if param in new}
    sizes = {}
    for exchange in program.every_exchange:
        changed = [bytes_of_shared(param) for param, read in read_for.items()
                   if exchange.variable in read and param.ndim == n_axes(exchange.variable)]
        if exchange.reduction == SUM and changed:
            sizes[exchange.source] = sum(changed) / len(changed)
    return sizes
