"""Give a graph its places, and lay out the contexts for it."""
from theano.gof.graph import ancestors, io_toposort
from theano.tensor import second

from ..devices.contexts import host_contexts
from ..devices.mesh import CPU, mesh_of
from ..graphs.graph import substitute
from .propagation import assigned, is_placed, own_place


def placed(outputs, updates, contexts):
    """A graph with a place for every op, and the mesh of contexts that it runs on.

    Parameters
    ----------
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
    contexts : list of Context, or list of list of Context
        See `mesh.mesh_of`.

    Returns
    -------
    outputs, updates
        Those given, if nothing is placed, else a copy of the graph.
    placement : dict of SharedVariable to str
        The place of each shared variable; empty if nothing is placed.
    mesh : Mesh

    Raises
    ------
    ContextError
        If the graph is placed on contexts that it cannot run on.
    GraphError
        If a part of the graph cannot be placed where it has to be.
    """
    whole = list(outputs) + list(updates.values())
    if not is_placed(whole + list(updates)):
        return outputs, updates, {}, mesh_of(contexts)
    names = _names(whole + list(updates))
    mesh = mesh_of(contexts, names)
    whole = without_fills(whole)
    outputs, updates = whole[:len(outputs)], dict(zip(updates, whole[len(outputs):]))
    outputs, updates, placement = assigned(outputs, updates, names[0])
    return outputs, updates, placement, mesh


def without_fills(outputs):
    """A graph in which no scalar is filled into the shape of another scalar.

    `theano.grad` begins with ``second(loss, 1)``. The backward pass would wait for the loss, which may be the sum of
    terms from several devices.
    """
    fills = {}
    for node in io_toposort([], outputs):
        if node.op == second:
            like, value = node.inputs
            if like.ndim == 0 and value.type == node.outputs[0].type:
                fills[node.outputs[0]] = fills.get(value, value)
    return substitute(outputs, fills) if fills else outputs


def _names(outputs):
    """The places that the user has given, in the order of the contexts of this host."""
    found = {own_place(variable) for variable in ancestors(outputs)}
    return [name for name in [context.name for context in host_contexts()] + [CPU] if name in found]
