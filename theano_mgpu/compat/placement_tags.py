"""Record on Theano's variables where they are to be computed: `placed_on`, and gradients beside their forward ops.

A place is the name of a context, ``'cpu'`` for the host, or a `Beside`. It is `variable.tag.mgpu_place`, the same for
all outputs of a node. Theano copies tags when it clones.
"""
from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator, List

from ..utils.attributes import temporarily
from .wrapping import wrap


class _Places(threading.local):
    """The places of the blocks that a thread is in, innermost last, and the state of a placed gradient."""

    def __init__(self) -> None:
        self.stack: List[Any] = [None]
        self.deriving = False


_places = _Places()


class Beside:
    """A place that is not known yet: nodes with the same one run on one device. A copy is the same object."""

    __slots__ = ('__weakref__',)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Beside, ()  # for all protocols of pickle; one object stays one within a pickle


@contextlib.contextmanager
def placed_on(place: str | Beside | None) -> Iterator[None]:
    """Give a place to the nodes and shared variables that are made in the ``with`` block.

    The block only has an effect once the patches of `FIRST_PLACEMENT` are applied.

    Parameters
    ----------
    place : str, Beside, or None
        None leaves them without a place, whatever the blocks around this one say.
    """
    _places.stack.append(place)
    try:
        yield
    finally:
        _places.stack.pop()


def place_of(variable: Any) -> str | Beside | None:
    """Return the place that a variable is tagged with; None if it has none."""
    return getattr(variable.tag, 'mgpu_place', None)


def place_of_node(node: Any) -> str | Beside | None:
    """Return the place that a node's outputs are tagged with; None if they have none."""
    return next((place for place in map(place_of, node.outputs) if place is not None), None)


def _tag(node, place):
    for output in node.outputs:
        output.tag.mgpu_place = place


def tag_new_nodes() -> None:
    """Give each new node, and each new shared variable, the place of the block that it is made in.

    Clones keep the place of the original.
    """
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.graph import Apply

    @wrap(Apply, '__init__')
    def init_node(original, self, op, inputs, outputs):
        original(self, op, inputs, outputs)
        place = _places.stack[-1]
        if place is not None:
            for output in self.outputs:
                if place_of(output) is None:
                    output.tag.mgpu_place = place

    @wrap(SharedVariable, '__init__')
    def init_shared(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if _places.stack[-1] is not None:
            self.tag.mgpu_place = _places.stack[-1]

    @wrap(Apply)
    def clone_with_new_inputs(original, self, inputs, strict=True):
        node, place = original(self, inputs, strict), place_of_node(self)
        if place is not None:  # a node that is made anew, for inputs of other types, has new outputs
            _tag(node, place)
        return node


def place_gradients() -> None:
    """Place the nodes that `theano.grad` derives from a node beside this node, if the graph has any place.

    A node without a place gets a `Beside`, which its gradient shares. A sum of gradients is beside the node whose
    output they are the gradient of; the gradient of a shared variable or an input has the place of that variable. The
    gradient of an inner graph is wholly beside the node that has it.
    """
    from theano import gradient
    from theano.gof.graph import ancestors

    @wrap(gradient)
    def _populate_grad_dict(original, var_to_app_to_idx, grad_dict, wrt, cost_name=None):
        if _places.deriving or all(place_of(variable) is None for variable in ancestors(list(var_to_app_to_idx))):
            return original(var_to_app_to_idx, grad_dict, wrt, cost_name)
        consumers = {variable: _Consumers(variable, nodes) for variable, nodes in var_to_app_to_idx.items()}
        with temporarily(_places, 'deriving', True), placed_on(None):
            return original(consumers, grad_dict, wrt, cost_name)


class _Consumers(dict):
    """The nodes that read a variable, as `theano.grad` iterates over them, see `place_gradients`.

    The innermost block has the place of a node while its gradient is derived, and the place of the variable when all
    nodes are done and their terms are added. In between, Theano may derive the gradients of the node's outputs: the
    block has the place of the node again when these are added.
    """

    def __init__(self, variable, nodes):
        super().__init__(nodes)
        self._variable = variable

    def __iter__(self):
        for node in super().__iter__():
            _places.stack[-1] = _place_beside(node)
            yield node
        owner = self._variable.owner
        _places.stack[-1] = place_of(self._variable) if owner is None else _place_beside(owner)


def _place_beside(node):
    """Return the place of a node; a new `Beside`, which it is tagged with, if it has none."""
    place = place_of_node(node)
    if place is None:
        place = Beside()
        _tag(node, place)
    return place
