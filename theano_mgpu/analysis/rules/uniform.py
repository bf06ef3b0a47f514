"""Rows that are the same for all samples, such as the number of a step that a loop counts for each sample."""
from __future__ import annotations

import numpy as np
import theano
from theano.compile import ops as compile_ops
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor

from ..shards import Shards
from .base import entries_of, is_scalar_op, number_everywhere, sliced_axes

DEEPEST = 100  # ops that are looked through
SAME = compile_ops.Rebroadcast, compile_ops.ViewOp, opt.Assert


def is_uniform(shards: Shards, variable: theano.Variable, axis: int,
               assumed: frozenset[tuple[theano.Variable, int]] = frozenset(), depth: int = 0) -> bool:
    """Return whether a variable is known to be the same all along an axis.

    Parameters
    ----------
    shards : Shards
    variable : theano.Variable
        Of the given graph.
    axis : int
    assumed : frozenset of (theano.Variable, int)
        States of a loop that are taken to be the same while their next values are looked at.
    depth : int
        Ops that have been looked through.
    """
    key = variable, axis, assumed
    if key not in shards.uniform:
        shards.uniform[key] = depth < DEEPEST and _is_uniform(shards, variable, axis, assumed, depth + 1)
    return shards.uniform[key]


def _is_uniform(shards, variable, axis, assumed, depth):
    if (variable, axis) in assumed or variable.broadcastable[axis] or number_everywhere(variable) is not None:
        return True
    if isinstance(variable, theano.Constant):
        return bool(np.all(variable.data == np.take(variable.data, [0], axis)))
    if variable in shards.sources:
        outer, shift = shards.sources[variable]
        return is_uniform(shards.around, outer, axis + shift, depth=depth)
    if variable in shards.recurrences:
        first, following = shards.recurrences[variable]
        assumed = assumed.union([(variable, axis)])
        return is_uniform(shards.around, first, axis + 1, depth=depth) and \
            all(is_uniform(shards, v, axis, assumed, depth) for v in following)
    if variable in shards.loops:
        inside, result, first = shards.loops[variable]
        return axis > 0 and is_uniform(inside, result, axis - 1, depth=depth) \
            and (first is None or is_uniform(shards, first, axis, depth=depth))
    sources = _sources(variable.owner, axis) if variable.owner else None
    return sources is not None and all(is_uniform(shards, v, each, assumed, depth) for v, each in sources)


def _sources(node, axis):
    """List the variables that must be the same along which axis, if an output is to be; None where not known."""
    op, first = node.op, node.inputs[0] if node.inputs else None
    if isinstance(op, elemwise.Elemwise):
        return [(v, axis) for v in node.inputs[is_scalar_op(node, scalar.Second):]]
    if isinstance(op, elemwise.DimShuffle):
        return [(first, op.new_order[axis])]
    if isinstance(op, SAME):
        return [(first, axis)]
    if isinstance(op, basic.Alloc):
        own = axis - (node.outputs[0].ndim - first.ndim)
        return [(first, own)] if own >= 0 else []
    if isinstance(op, subtensor.Subtensor):
        return [(first, sliced_axes(entries_of(node), first.ndim)[axis])]
    if isinstance(op, subtensor.IncSubtensor) and op.set_instead_of_inc and first.owner \
            and isinstance(first.owner.op, basic.AllocEmpty) and len(op.idx_list) <= axis \
            and node.inputs[1].ndim == first.ndim:
        return [(node.inputs[1], axis)]  # the first values of a loop, ahead of memory that it writes into
    return None
