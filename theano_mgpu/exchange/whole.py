"""Values of replicas, reduced or put together: over the replicas of this process, then over the ranks."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..comm.activities import ADD
from ..comm.collectives import all_gather_int, all_gather_object, all_gather_rows
from ..comm.communicator import Communicator
from ..comm.host_sum import describe
from ..comm.tree import Tree
from ..devices.transfers import concatenated
from ..graph.analysis import SAME, STACK, SUM, Gather, Reduction
from ..graph.analysis.reductions import Elementwise
from .layout import Layout


def exchanged(parts: Sequence[Sequence[Any]], reductions: Sequence[Reduction], lengths: Sequence[int],
              ranks: Communicator, tree: Tree | None = None) -> list[Any]:
    """Return the whole of each value, the same on every rank, of the parts of the replicas of this process.

    The lengths are the samples of each rank; the parts of a rank without any do not count. The parts of logical shards
    are reduced in the order of a tree.
    """
    if tree is not None:
        return [_by_tree(each, reduction, tree, ranks) if isinstance(reduction, Elementwise) else
                exchanged([each], [reduction], lengths, ranks)[0] for each, reduction in zip(parts, reductions)]
    values = [_of_process(each, reduction) for each, reduction in zip(parts, reductions)]
    if ranks.size == 1:
        return values
    sums = [i for i, reduction in enumerate(reductions) if reduction == SUM]
    counts = lengths[ranks.rank] > 0
    if sums:  # they are exchanged in one piece for each dtype
        memory = Layout(describe([values[i] for i in sums])).allocated(np.zeros)
        for number, i in enumerate(sums):
            if counts:
                memory.views[number][...] = values[i]
            values[i] = memory.views[number]
        ranks.handshake((ADD,))
        ranks.all_reduce(list(memory.flat.values()))
    for i, reduction in enumerate(reductions):
        if reduction not in (SUM, SAME):
            values[i] = _of_ranks(values[i], reduction, lengths, ranks)
    return values


def _by_tree(parts, reduction, tree, ranks):
    if ranks.size > 1:
        parts = all_gather_rows(ranks, np.stack(parts), tree.counts)
    return np.asarray(tree.reduced(parts, reduction.ufunc), parts[0].dtype)


def _of_process(parts, reduction):
    if len(parts) == 1 or reduction == SAME:
        return parts[0]
    return concatenated(parts, reduction.axis) if isinstance(reduction, Gather) else \
        np.asarray(reduction.ufunc.reduce(parts), parts[0].dtype)


def _of_ranks(value, reduction, lengths, ranks):
    counts = [int(length > 0) for length in lengths]
    if reduction == STACK:
        lengths_of_stacks = [count * n for count, n in zip(counts, all_gather_int(ranks, len(value)))]
        return all_gather_rows(ranks, value, lengths_of_stacks)
    if isinstance(reduction, Gather):
        return _gathered(value, reduction.axis, lengths, ranks)
    every = all_gather_rows(ranks, np.ascontiguousarray(value[np.newaxis]), counts)
    return np.asarray(reduction.ufunc.reduce(every), value.dtype)


def _gathered(value, axis, lengths, ranks):
    """Return the rows of all ranks along an axis; rows of arrays are sent from their memory."""
    if not isinstance(value, np.ndarray):
        parts = all_gather_object(ranks, value if lengths[ranks.rank] else None)
        return concatenated([part for part in parts if part is not None], axis)
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
    each = rows.shape[0] // max(1, lengths[ranks.rank])  # a sample may own several rows
    return np.moveaxis(all_gather_rows(ranks, rows, [each * length for length in lengths]), 0, axis)
