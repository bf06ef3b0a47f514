"""The bytes of values: of shared variables, and, for one batch, of the values that a step exchanges or holds."""
from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Sequence, Tuple

import numpy as np
import theano
from theano.compile.ops import Shape, Shape_i
from theano.compile.sharedvalue import SharedVariable
from theano.gof import FunctionGraph
from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
from theano.tensor.opt import ShapeFeature

from ..compat.theano_functions import plain_function
from ..graph.analysis import STACK, Gather
from ..graph.graph import free_inputs
from ..graph.own_flags import builds_graphs

Sizes = Tuple[int, ...]
Shapes = Dict[theano.Variable, Sizes]


def bytes_of(variable: theano.Variable, shape: Sequence[int]) -> int:
    """Return the bytes of a value of a variable's dtype."""
    return int(np.prod(shape, dtype='int64')) * np.dtype(variable.type.dtype).itemsize


def bytes_of_shared(variable: SharedVariable) -> int:
    """Return the bytes of the value of a shared variable; 0 for a value that is no array."""
    value = variable.container.storage[0]
    return value.size * np.dtype(value.dtype).itemsize if hasattr(value, 'size') and hasattr(value, 'dtype') else 0


@builds_graphs
def shapes_of(plan: Any, shapes: Mapping[theano.Variable, Sizes]) -> Shapes:
    """Return the shapes of the values in a step, for one batch.

    Parameters
    ----------
    plan : StepPlan
    shapes : dict of theano.Variable to tuple of int
        The shapes of a replica's inputs in a micro-batch.

    Returns
    -------
    dict of theano.Variable to tuple of int
        Without values whose shape depends on other values.
    """
    known = {**shapes, **dict.fromkeys(plan.program.numbers, ())}
    for stage in plan.stages:
        _add_exchanged(known, stage.boundary.exchanges, plan.shares.n_replicas)
        known.update((variable, known[source]) for variable, source in stage.saved.items() if source in known)
        for part in stage.parts:
            _add_shapes(known, part)
    _add_exchanged(known, plan.last.exchanges, plan.shares.n_replicas)
    for part in plan.update:
        _add_shapes(known, part)
    return known


def peak_of(part: Any, known: Mapping[theano.Variable, Sizes]) -> int | None:
    """Return about how many bytes the values of a part have that are alive at the same time; None if not known.

    The graph counts as it is before Theano optimises it: views count nothing, and a result in place, or one
    that is fused, counts twice.
    """
    kept = {*part.graphs, *part.updates.values()}
    nodes = io_toposort([], list(kept))
    if nodes and not any(variable in known for node in nodes for variable in node.outputs):
        return None
    last_use = {variable: i for i, node in enumerate(nodes) for variable in node.inputs}
    alive: dict[theano.Variable, int] = {}
    peak = 0
    for i, node in enumerate(nodes):
        for number, variable in enumerate(node.outputs):
            if number not in (getattr(node.op, 'view_map', None) or {}) and hasattr(variable.type, 'dtype'):
                alive[variable] = bytes_of(variable, known[variable]) if variable in known else 0
        peak = max(peak, sum(alive.values()))
        for variable in node.inputs:
            if last_use[variable] == i and variable not in kept:
                alive.pop(variable, None)
    return peak


def _add_exchanged(known: Shapes, exchanges: Iterable[Any], n_replicas: int) -> None:
    """Add the shapes of exchanged values; all replicas count as having as many samples as the first."""
    for variable, source, reduction in exchanges:
        if source in known:
            shape = known[source]
            if reduction == STACK:
                shape = (n_replicas, *shape)
            elif isinstance(reduction, Gather):
                shape = (*shape[:reduction.axis], n_replicas * shape[reduction.axis], *shape[reduction.axis + 1:])
            known[variable] = shape


def _add_shapes(known: Shapes, part: Any) -> None:
    """Add the shapes of the values in a part, as far as they follow from the shapes of its inputs."""
    outputs = [v for v in [*part.graphs, *part.updates.values()] if hasattr(v.type, 'broadcastable')]
    given = {stand_in: known.get(variable) for variable, stand_in in zip(part.given, part.inputs)}
    inputs = list(free_inputs(outputs))
    if not outputs or any(given.get(v) is None and v.ndim for v in inputs):
        return
    shared = [v for v in ancestors(outputs) if isinstance(v, SharedVariable)]
    equivalents = clone_get_equiv(inputs + shared, outputs)
    graph = FunctionGraph([equivalents[v] for v in inputs + shared], [equivalents[v] for v in outputs], clone=False,
                          features=[ShapeFeature()])
    shape_of = graph.shape_feature.shape_of
    dims = {v: shape_of[clone] for v, clone in equivalents.items()
            if isinstance(v, theano.Variable) and shape_of.get(clone) is not None and _is_computable(shape_of[clone])}
    evaluate: Any = plain_function(graph.inputs[:len(inputs)], sum((list(each) for each in dims.values()), []),
                                   mode=theano.Mode('py', None), on_unused_input='ignore')
    # Only shapes of shared variables are read: no process has to send the others its values for that.
    numbers = iter(evaluate.unwatched_call(*[np.broadcast_to(np.ones((), v.dtype), given[v] or ()) for v in inputs]))
    known.update((v, tuple(int(next(numbers)) for _ in each)) for v, each in dims.items())
    known.update((variable, known[graph]) for variable, graph in zip(part.outputs, part.graphs) if graph in dims)


def _is_computable(dims: Iterable[theano.Variable]) -> bool:
    """Return whether sizes follow from the sizes of inputs and variables, without computing values of these sizes."""
    return not any(v.owner and isinstance(v.owner.op, (Shape, Shape_i)) and v.owner.inputs[0].owner
                   for v in ancestors(list(dims)))
