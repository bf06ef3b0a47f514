"""Patches with which Theano calls the placement for each new node, and for the gradients of a graph."""
from __future__ import annotations

from typing import Any

from .wrapping import wrap


def tag_new_nodes(tags: Any) -> None:
    """Have Theano pass each new node, shared variable and clone to `tags`, a module: see `graph.placement.tags`."""
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.graph import Apply

    @wrap(Apply, '__init__')
    def init_node(original, self, op, inputs, outputs):
        original(self, op, inputs, outputs)
        tags.tag_new(self.outputs)

    @wrap(SharedVariable, '__init__')
    def init_shared(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        tags.tag_new([self])

    @wrap(Apply)
    def clone_with_new_inputs(original, self, inputs, strict=True):
        node, place = original(self, inputs, strict), tags.place_of_node(self)
        if place is not None:  # a node that is made anew, for inputs of other types, has new outputs
            tags.tag(node, place)
        return node


def place_gradients(tags: Any) -> None:
    """Have `theano.grad` derive gradients by way of `graph.placement.tags.beside_forward_ops`."""
    from theano import gradient

    @wrap(gradient)
    def _populate_grad_dict(original, *args, **kwargs):
        return tags.beside_forward_ops(original, *args, **kwargs)
