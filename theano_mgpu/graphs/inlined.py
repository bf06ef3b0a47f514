"""Graphs without `OpFromGraph`, an op that is made of a graph."""
from __future__ import annotations

from typing import Sequence

import theano
from theano.compile.builders import OpFromGraph
from theano.gof.graph import io_toposort

from .rewrites import rebuilt


def inlined(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Replace each OpFromGraph, and with it its gradient, by its inner graph."""
    while any(isinstance(node.op, OpFromGraph) for node in io_toposort([], outputs)):  # inner graphs may have some, too
        outputs = rebuilt(outputs, lambda node, inputs:
                          inner_graph(node, inputs) if isinstance(node.op, OpFromGraph) else None)
    return list(outputs)


def inner_graph(node: theano.Apply, inputs: list[theano.Variable]) -> list[theano.Variable]:
    """Return the outputs of an OpFromGraph, or of its gradient, as expressions of inputs."""
    return theano.clone(node.op.local_outputs, dict(zip(node.op.local_inputs, inputs)))
