"""The contexts that a function is asked to run over."""
from __future__ import annotations

from typing import Any

from ..errors import ContextError
from . import leases
from .context_map import Context, describe
from .contexts import contexts as active_contexts
from .contexts import get as get_context
from .mesh import rows_of


def resolve_contexts(contexts: Any) -> list[Any]:
    """Return the Contexts that a function runs over, for its keyword `contexts`: by default, all active ones.

    With several processes on a host, they are the contexts of this process alone; a process that takes one device has
    that one, whatever is asked for. Lists of contexts, one for each replica of a placed graph, are complete:
    `mesh.mesh_of` selects the replicas of this process. Raise a ContextError if the list is empty, names a context
    twice or one that is not mapped, or none of this process's own.
    """
    if contexts is None or leases.is_child():
        return active_contexts()
    contexts = [contexts] if isinstance(contexts, str) else contexts
    if not isinstance(contexts, (list, tuple)):
        raise ContextError('contexts=%r is not a list of contexts or their names, such as %r; mgpu.init(%r) maps them'
                           % (contexts, [context.name for context in active_contexts()], contexts))
    rows = rows_of(contexts)
    if rows and len(rows) < len(contexts):
        raise ContextError('contexts=%r mixes contexts with lists of contexts: give one list, or a list for each '
                           'replica' % (contexts,))
    chosen = [get_context(c.name if isinstance(c, Context) else c) for c in (sum(rows, []) if rows else contexts)]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ContextError('a function runs over at least one context, each named once; given: %r, known: %s'
                           % (list(contexts), describe(active_contexts())))
    own = [context for context in chosen if context in active_contexts()]
    if not own:
        raise ContextError('the contexts %s belong to other processes; this one has %s'
                           % (describe(chosen), describe(active_contexts())))
    if rows:
        return [[chosen.pop(0) for _ in row] for row in rows]
    return own
