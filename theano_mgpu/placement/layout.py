"""Give a graph its places, and lay out the contexts for it."""
from theano.gof.graph import ancestors, io_toposort
from theano.tensor import second

from ..devices.context_map import describe
from ..devices.contexts import contexts as active_contexts
from ..devices.contexts import host_contexts
from ..devices.mesh import CPU, mesh_of
from ..errors import ContextError
from ..graphs.graph import substitute
from ..graphs.merge import merged
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
    mesh : Mesh
        With the place of each shared variable.

    Raises
    ------
    ContextError
        If the graph is placed on contexts that it cannot run on.
    GraphError
        If a part of the graph cannot be placed where it has to be.
    """
    whole = list(outputs) + list(updates.values())
    if not is_placed(whole + list(updates)):
        return outputs, updates, mesh_of(contexts)
    names = _names(whole + list(updates))
    mesh = mesh_of(contexts, names, active_contexts())
    whole = without_fills(whole)
    outputs, updates = whole[:len(outputs)], dict(zip(updates, whole[len(outputs):]))
    outputs, updates, placement = assigned(outputs, updates, names[0])
    whole = merged(outputs + list(updates.values()))
    return whole[:len(outputs)], dict(zip(updates, whole[len(outputs):])), mesh._replace(placement=placement)


def mesh_for(variables, contexts):
    """The mesh of contexts for a graph that is placed; `variables` are its outputs, and those that are updated."""
    return mesh_of(contexts, _names(variables), active_contexts())


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
    found = {place for place in map(own_place, ancestors(outputs)) if isinstance(place, str)}
    known = [context.name for context in host_contexts()] + [CPU]
    gone = sorted(found.difference(known))
    if gone:
        raise ContextError('the graph is placed on %s, which %s not mapped any more; mapped: %s. Map the contexts by '
                           'these names, or build the graph again'
                           % (', '.join(gone), 'is' if len(gone) == 1 else 'are', describe(host_contexts())))
    return [name for name in known if name in found]
