"""Give a graph its places, and lay out the contexts for it."""
from theano.gof.graph import ancestors

from ..devices.contexts import host_contexts
from ..devices.mesh import CPU, mesh_of
from .propagation import assigned, own_place


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
    names = _names(outputs, updates)
    if not names:
        return outputs, updates, {}, mesh_of(contexts)
    mesh = mesh_of(contexts, names)
    outputs, updates, placement = assigned(outputs, updates, names[0])
    return outputs, updates, placement, mesh


def _names(outputs, updates):
    """The places that the user has given, in the order of the contexts of this host."""
    variables = ancestors(list(outputs) + list(updates.values())) + list(updates)
    found = {own_place(variable) for variable in variables}
    return [name for name in [context.name for context in host_contexts()] + [CPU] if name in found]
