"""Record on Theano's variables where they are to be computed: `placed_on`, and gradients beside their forward ops.

A place is the name of a context, ``'cpu'`` for the host, or a `Beside`. It is `variable.tag.mgpu_place`, the same for
all outputs of a node. Theano copies tags when it clones.
"""
import contextlib
import functools
import threading

_patched = []         # what is patched in this process
_lock = threading.Lock()


class _Places(threading.local):
    """The places of the blocks that a thread is in, innermost last; and whether it is deriving a placed gradient."""

    def __init__(self):
        self.stack = [None]
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
        return Beside, ()  # for all protocols of pickle; one pickle keeps what was one object


@contextlib.contextmanager
def placed_on(place):
    """A block in which new nodes and new shared variables get a place.

    It only has an effect once the patches of `FIRST_PLACEMENT` are applied.

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


def place_of(variable):
    """The place that a variable is tagged with; None if it has none."""
    return getattr(variable.tag, 'mgpu_place', None)


def place_of_node(node):
    """The place that a node's outputs are tagged with; None if they have none."""
    return next((place for place in map(place_of, node.outputs) if place is not None), None)


def _once(patch):
    """A patch that does nothing the second time."""
    @functools.wraps(patch)
    def apply():
        with _lock:
            if patch not in _patched:
                patch()
                _patched.append(patch)
    return apply


@_once
def tag_new_nodes():
    """Have Theano give each new node, and each new shared variable, the place of the block that it is made in.

    Clones keep the place of what they are clones of.
    """
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.graph import Apply
    make_node, make_shared, clone = Apply.__init__, SharedVariable.__init__, Apply.clone_with_new_inputs

    @functools.wraps(make_node)
    def init_node(self, op, inputs, outputs):
        make_node(self, op, inputs, outputs)
        place = _places.stack[-1]
        if place is not None:
            for output in self.outputs:
                if place_of(output) is None:
                    output.tag.mgpu_place = place

    @functools.wraps(make_shared)
    def init_shared(self, *args, **kwargs):
        make_shared(self, *args, **kwargs)
        if _places.stack[-1] is not None:
            self.tag.mgpu_place = _places.stack[-1]

    @functools.wraps(clone)
    def clone_with_new_inputs(self, inputs, strict=True):
        node, place = clone(self, inputs, strict), place_of_node(self)
        if place is not None:  # a node that is made anew, for inputs of other types, has new outputs
            for output in node.outputs:
                output.tag.mgpu_place = place
        return node

    Apply.__init__, SharedVariable.__init__, Apply.clone_with_new_inputs = init_node, init_shared, clone_with_new_inputs


@_once
def place_gradients():
    """Have `theano.grad` place what it derives from a node beside this node, if any variable of the graph has a place.

    A node without a place gets a `Beside`, which its gradient shares. A sum of gradients is beside the node whose
    output they are the gradient of; that of a shared variable or an input has the place of that variable. The gradient
    of an inner graph is wholly beside the node that has it.
    """
    from theano import gradient
    from theano.gof.graph import ancestors
    original = gradient._populate_grad_dict

    @functools.wraps(original)
    def populate(var_to_app_to_idx, grad_dict, wrt, cost_name=None):
        if _places.deriving or all(place_of(variable) is None for variable in ancestors(list(var_to_app_to_idx))):
            return original(var_to_app_to_idx, grad_dict, wrt, cost_name)
        consumers = {variable: _Consumers(variable, nodes) for variable, nodes in var_to_app_to_idx.items()}
        _places.deriving = True
        try:
            with placed_on(None):
                return original(consumers, grad_dict, wrt, cost_name)
        finally:
            _places.deriving = False

    gradient._populate_grad_dict = populate


class _Consumers(dict):
    """The nodes that read a variable, as `theano.grad` iterates over them, see `place_gradients`.

    The place of the innermost block is that of the node while its gradient is derived, and that of the variable when
    all nodes are done and their terms are added. In between, Theano may derive the gradients of the node's outputs: the
    place is that of the node again when these are added.
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
    """The place of a node; a new `Beside`, which it is tagged with, if it has none."""
    place = place_of_node(node)
    if place is None:
        place = Beside()
        for output in node.outputs:
            output.tag.mgpu_place = place
    return place
