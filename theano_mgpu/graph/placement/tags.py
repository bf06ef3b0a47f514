"""Places on Theano's variables: where each is to be computed, and gradients beside their forward ops.

A place is the name of a context, ``'cpu'`` for the host, or a `Beside`. It is `variable.tag.mgpu_place`, the same for
all outputs of a node. Theano copies tags when it clones.
"""
from __future__ import annotations

import threading
from typing import Any, Callable, Iterable

import theano
from theano.gof.graph import ancestors

from ...utils.attributes import temporarily
from .. import layers
from ..traces import put_in_layer


class _Blocks(threading.local):
    """The place of the innermost block that a thread is in.

    It is followed by whether the thread derives a placed gradient, and the part of this that is timed.
    """

    place: Any = None
    deriving, part = False, ''


_blocks = _Blocks()


class Beside:
    """A place that is not known yet: nodes with the same one run on one device. A copy is the same object."""

    __slots__ = ('__weakref__',)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Beside, ()  # for all protocols of pickle; one object stays one within a pickle


def placed_on(place: str | Beside | None) -> Any:
    """Give a place to the nodes and shared variables that are made in the ``with`` block, after `record_places`.

    Parameters
    ----------
    place : str, Beside, or None
        None leaves them without a place, whatever the blocks around this one say.
    """
    return temporarily(_blocks, 'place', place)


def place_of(variable: Any) -> str | Beside | None:
    """Return the place that a variable is tagged with; None if it has none."""
    return getattr(variable.tag, 'mgpu_place', None)


def place_of_node(node: theano.Apply) -> str | Beside | None:
    """Return the place that a node's outputs are tagged with; None if they have none."""
    return next((place for place in map(place_of, node.outputs) if place is not None), None)


def tag(node: theano.Apply, place: str | Beside) -> None:
    """Tag a node with a place."""
    for output in node.outputs:
        output.tag.mgpu_place = place


def tag_new(variables: Iterable[theano.Variable]) -> None:
    """Tag new variables with the place of the block that they are made in, unless they have one, and with their part.
    """
    place = _blocks.place
    for variable in variables if place is not None else ():
        if place_of(variable) is None:
            variable.tag.mgpu_place = place
        if _blocks.part:
            put_in_layer(variable, _blocks.part)


def beside_forward_ops(populate: Callable[..., Any], consumers: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Place the nodes that `theano.grad` derives from a node beside this node, if the graph has any place.

    A node without a place gets a `Beside`, which its gradient shares. A sum of gradients is beside the node whose
    output they are the gradient of; the gradient of a shared variable or an input has the place of that variable. The
    gradient of an inner graph is wholly beside the node that has it. Where layers are timed, such nodes are also part
    of the gradient of the same layer. This wraps Theano's ``_populate_grad_dict``, which is given the nodes that read
    each variable.
    """
    if _blocks.deriving or not layers.is_on and all(place_of(each) is None for each in ancestors(list(consumers))):
        return populate(consumers, *args, **kwargs)
    layers.name_function(list(consumers))
    with temporarily(_blocks, 'deriving', True), temporarily(_blocks, 'part', ''), placed_on(None):
        return populate({variable: _Consumers(variable, nodes) for variable, nodes in consumers.items()},
                        *args, **kwargs)


class _Consumers(dict):
    """The nodes that read a variable, as `theano.grad` iterates over them, see `beside_forward_ops`.

    The innermost block has the place of a node while its gradient is derived, and the place of the variable when all
    nodes are done and their terms are added. In between, Theano may derive the gradients of the node's outputs: the
    block has the place of the node again when these are added.
    """

    def __init__(self, variable, nodes):
        super().__init__(nodes)
        self._variable = variable

    def __iter__(self):
        for node in super().__iter__():
            _blocks.place = _place_beside(node)
            yield node
        owner = self._variable.owner
        _blocks.place = place_of(self._variable) if owner is None else _place_beside(owner)


def _place_beside(node):
    """Return the place of a node; a new `Beside`, which it is tagged with, if it has none. Enter its part."""
    _blocks.part = layers.gradient_of(node)
    place = place_of_node(node)
    if place is None:
        place = Beside()
        tag(node, place)
    return place
