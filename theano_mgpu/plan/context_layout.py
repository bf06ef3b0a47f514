"""The layout of the contexts for a graph, and the places of its ops."""
from __future__ import annotations

from typing import Any, Collection, Iterable, Sequence

import theano
from theano.compile import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.tensor import second

from ..devices.context_map import describe
from ..devices.contexts import contexts as active_contexts
from ..devices.contexts import host_contexts
from ..devices.mesh import CPU, Mesh, mesh_of
from ..errors import ContextError, GraphError, warn
from ..graph.graph import bytes_of_shared, parts_by_bytes
from ..graph.placement.propagation import assigned, is_placed, own_place
from ..graph.rewrites import merged, rebuilt


def placed(outputs: Sequence[theano.Variable], updates: dict[SharedVariable, theano.Variable], contexts: Any,
           ) -> tuple[Sequence[theano.Variable], dict[SharedVariable, theano.Variable], Mesh]:
    """Return a graph with a place for every op, and the mesh of contexts that it runs on, see `mesh.mesh_of`.

    If nothing is placed, the graph is returned as it is, else a copy. The mesh has the place of each shared variable.
    Raise a ContextError if the graph is placed on contexts that it cannot run on, and a GraphError if a part of it
    cannot be placed where it has to be.
    """
    whole = list(outputs) + list(updates.values())
    if not is_placed(whole + list(updates)):
        return outputs, updates, mesh_of(contexts)
    names = _names(whole + list(updates))
    mesh = mesh_of(contexts, names, active_contexts())
    whole = _without_fills(whole)
    outputs, updates, placement = assigned(whole[:len(outputs)], dict(zip(updates, whole[len(outputs):])), names[0])
    whole = merged(outputs + list(updates.values()))
    return whole[:len(outputs)], dict(zip(updates, whole[len(outputs):])), mesh._replace(placement=placement)


def spread_over(outputs: Sequence[theano.Variable], updates: dict[SharedVariable, theano.Variable],
                contexts: Sequence[Any], params: Collection[SharedVariable],
                ) -> tuple[Sequence[theano.Variable], dict[SharedVariable, theano.Variable], Mesh]:
    """Return what `placed` does, with the parameters spread over the contexts; without that if it cannot be done.

    They are tagged in the order of their use, about as many bytes for each context. Every other variable is placed by
    them: see `propagation`. Functions that are made later are placed alike.
    """
    used = list(dict.fromkeys(variable for node in io_toposort([], [*outputs, *updates.values()])
                              for variable in node.inputs if variable in params))
    for variable, number in zip(used, parts_by_bytes(list(map(bytes_of_shared, used)), len(contexts))):
        variable.tag.mgpu_place = contexts[number].name
    try:
        return placed(outputs, updates, contexts)
    except (ContextError, GraphError) as error:
        for variable in used:
            del variable.tag.mgpu_place
        warn('the parameters cannot be spread over the contexts: %s' % error)
        return placed(outputs, updates, contexts)


def mesh_for(variables: Iterable[theano.Variable], contexts: Any) -> Mesh:
    """Return the mesh of contexts for a placed graph; `variables` are its outputs, and the variables it updates."""
    return mesh_of(contexts, _names(variables), active_contexts())


def _without_fills(outputs):
    """Return a graph in which no scalar is filled into the shape of another scalar.

    `theano.grad` begins with ``second(loss, 1)``. The backward pass would wait for the loss, which may be the sum of
    terms from several devices.
    """
    return rebuilt(outputs, lambda node, inputs: inputs[1:] if node.op == second and node.inputs[0].ndim == 0
                   and inputs[1].type == node.outputs[0].type else None)


def _names(outputs):
    """Return the places that the user has named, in the order of the contexts of this host."""
    used = {place for place in map(own_place, ancestors(outputs)) if isinstance(place, str)}
    known = [context.name for context in host_contexts()] + [CPU]
    gone = sorted(used.difference(known))
    if gone:
        raise ContextError('the graph is placed on %s, which %s not mapped any more; mapped: %s. Map the contexts by '
                           'these names, or build the graph again'
                           % (', '.join(gone), 'is' if len(gone) == 1 else 'are', describe(host_contexts())))
    return [name for name in known if name in used]
