"""The patches of this room: Theano calls it for each new node and function, and for the gradients of a graph."""
from __future__ import annotations

from ..compat.patch import AT_ENABLE, Patch, apply
from ..compat.wrapping import wrap
from . import layers, theano_functions
from .placement import tags

FIRST_PLACEMENT = 'at the first mgpu.device() or mgpu.place(), or to time layers'


def record_places() -> None:
    """Have Theano record places from now on; this patches Theano at the first call."""
    apply(PATCHES, FIRST_PLACEMENT)


def time_layers() -> None:
    """Have the functions that are made from now on time their ops by layer."""
    from theano import config
    layers.is_on = True
    config.traceback.limit = config.traceback.limit or 1  # the layer of an op is with the lines that made it
    record_places()  # and the layers of gradients
    theano_functions.hook_functions_once()


def tag_new_nodes() -> None:
    """Have Theano pass each new node, shared variable and clone to `tags`."""
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


def place_gradients() -> None:
    """Have `theano.grad` derive gradients by way of `tags.beside_forward_ops`."""
    from theano import gradient
    wrap(gradient, '_populate_grad_dict')(tags.beside_forward_ops)


PATCHES = [
    Patch('Theano', '1.0.5', 'theano.function makes functions for one device only',
          AT_ENABLE, theano_functions.after_each_function, 'test_scripts_give_the_figures_of_plain_theano'),
    Patch('Theano', '1.0.5', 'a copy of a function runs on one device only',
          AT_ENABLE, theano_functions.divide_copies, 'test_a_copy_is_divided'),
    Patch('Theano', '1.0.5', 'variables do not know the device() block that they were made in',
          FIRST_PLACEMENT, tag_new_nodes, 'test_each_patch_is_needed'),
    Patch('Theano', '1.0.5', 'gradients are not on the device of their forward op',
          FIRST_PLACEMENT, place_gradients, 'test_each_patch_is_needed'),
]
