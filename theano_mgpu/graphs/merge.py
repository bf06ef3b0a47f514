"""Graphs that compute nothing twice."""
from __future__ import annotations

from typing import Any, Sequence

import theano

from ..patches.placement_tags import place_of_node
from .rewrites import rebuilt


def merged(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Copy a graph so that no op is computed twice on a place.

    A duplicate would be exchanged, and carried from stage to stage, a second time. Gradients have ops of their own for
    values of the forward pass, such as the tanh in ``1 - tanh(x) ** 2``.

    Parameters
    ----------
    outputs : list of theano.Variable

    Returns
    -------
    list of theano.Variable
        Nodes without duplicates above them are reused, not copied.
    """
    constants: dict[Any, theano.Variable] = {}
    firsts: dict[Any, list[theano.Variable]] = {}

    def once(node, inputs):
        inputs = [constants.setdefault(v.signature(), v) if isinstance(v, theano.Constant) else v for v in inputs]
        key = node.op, place_of_node(node), tuple(inputs), tuple(v.type for v in node.outputs)
        if key not in firsts:
            firsts[key] = node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
        return firsts[key]
    return rebuilt(outputs, once)
