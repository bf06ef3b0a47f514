"""The bytes of the values of a step for one batch: of what is exchanged, and of what a device holds at once."""
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np
import theano
from theano.compile.ops import Shape, Shape_i
from theano.compile.sharedvalue import SharedVariable
from theano.gof import FunctionGraph
from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
from theano.tensor.opt import ShapeFeature

from ..analysis import STACK, Gather
from ..graphs.graph import free_inputs
from ..graphs.own_flags import builds_graphs
from ..patches.theano_functions import plain_function

Sizes = Tuple[int, ...]
Shapes = Dict[theano.Variable, Sizes]


@builds_graphs
def shapes_of(plan: Any, shapes: Mapping[theano.Variable, Sizes]) -> Shapes:
    """Return the shapes of the values that the parts of a plan take and make, for one batch.

    Parameters
    ----------
    plan : StepPlan
    shapes : dict of theano.Variable to tuple of int
        Those of a replica's inputs in a micro-batch.

    Returns
    -------
    dict of theano.Variable to tuple of int
        Without values whose shape depends on other values.
    """
    known, n = {**shapes, **dict.fromkeys(plan.program.numbers, ())}, plan.shares.n_replicas
    for stage in plan.stages:
        _add_exchanged(known, stage.boundary.exchanges, n)
        known.update((variable, known[source]) for variable, source in stage.saved.items() if source in known)
        for part in stage.parts:
            found = _shapes(part, known)
            known.update((variable, found[graph]) for variable, graph in zip(part.outputs, part.graphs)
                         if graph in found)
    _add_exchanged(known, plan.last.exchanges, n)
    return known


@builds_graphs
def peak_of(part: Any, known: Mapping[theano.Variable, Sizes]) -> Optional[int]:
    """Return about how many bytes the values of a part have that are alive at the same time; None if not known.

    The values are those of the graph before Theano optimises it: views count nothing, and what is computed in place or
    fused counts twice.
    """
    outputs = list(part.graphs) + list(part.updates.values())
    shapes, nodes = _shapes(part, known), io_toposort([], outputs)
    last_use = {variable: i for i, node in enumerate(nodes) for variable in node.inputs}
    alive: Dict[theano.Variable, int] = {}
    peak, kept = 0, set(outputs)
    for i, node in enumerate(nodes):
        for number, variable in enumerate(node.outputs):
            if number not in (getattr(node.op, 'view_map', None) or {}) and hasattr(variable.type, 'dtype'):
                alive[variable] = bytes_of(variable, shapes[variable]) if variable in shapes else 0
        peak = max(peak, sum(alive.values()))
        for variable in node.inputs:
            if last_use[variable] == i and variable not in kept:
                alive.pop(variable, None)
    return peak if shapes else None


def _add_exchanged(known, exchanges, n_replicas):
    """Note the shapes of exchanged values; all replicas count as having as many samples as the first."""
    for variable, source, reduction in exchanges:
        if source in known:
            shape = known[source]
            if reduction == STACK:
                shape = (n_replicas, *shape)
            elif isinstance(reduction, Gather):
                shape = (*shape[:reduction.axis], n_replicas * shape[reduction.axis], *shape[reduction.axis + 1:])
            known[variable] = shape


def _shapes(part, known: Mapping[theano.Variable, Sizes]) -> Shapes:
    """Return the shapes of the values in the graph of a part, as far as they follow from those of its inputs."""
    outputs = [v for v in list(part.graphs) + list(part.updates.values()) if hasattr(v.type, 'broadcastable')]
    given = {stand_in: known.get(variable) for variable, stand_in in zip(part.given, part.inputs)}
    inputs = list(free_inputs(outputs))
    if not outputs or any(given.get(v) is None and v.ndim for v in inputs):
        return {}
    shared = [v for v in ancestors(outputs) if isinstance(v, SharedVariable)]
    equivalents = clone_get_equiv(inputs + shared, outputs)
    graph = FunctionGraph([equivalents[v] for v in inputs + shared], [equivalents[v] for v in outputs], clone=False,
                          features=[ShapeFeature()])
    shape_of = graph.shape_feature.shape_of
    dims = {v: shape_of[clone] for v, clone in equivalents.items()
            if isinstance(v, theano.Variable) and shape_of.get(clone) is not None and _is_computable(shape_of[clone])}
    evaluate = plain_function(graph.inputs[:len(inputs)], sum((list(each) for each in dims.values()), []),
                              mode=theano.Mode('py', None), on_unused_input='ignore')
    values = [np.broadcast_to(np.ones((), v.dtype), given[v] if v.ndim else ()) for v in inputs]
    numbers = iter(evaluate(*values))
    return {v: tuple(int(next(numbers)) for _ in each) for v, each in dims.items()}


def _is_computable(dims) -> bool:
    """Return whether sizes follow from those of inputs and variables, without computing what has the sizes."""
    return not any(v.owner and isinstance(v.owner.op, (Shape, Shape_i)) and v.owner.inputs[0].owner
                   for v in ancestors(list(dims)))


def bytes_of(variable: theano.Variable, shape: Sizes) -> int:
    """Return the bytes of a value of a variable's dtype."""
    return int(np.prod(shape, dtype='int64')) * np.dtype(variable.type.dtype).itemsize
