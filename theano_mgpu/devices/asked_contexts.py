"""The contexts that a function is asked to run over."""
from __future__ import annotations

from numbers import Integral
from typing import Any

from ..errors import ContextError
from ..parsing import MOST_DEVICES
from ..utils import mpi_environment
from . import leases
from .context_map import Context, brief, describe, longer_map
from .contexts import configured, host_contexts, of_all_devices
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


def chosen_contexts(gpus: Any) -> list[Context]:
    """Return the contexts for a number of contexts, for a list of their numbers or names, or for None: all.

    A ContextError lists the existing ones.
    """
    there, is_number = active_contexts(), isinstance(gpus, Integral) and not isinstance(gpus, bool)
    if not (is_number or gpus is None or isinstance(gpus, (list, tuple)) and not rows_of(gpus)):
        raise ContextError('gpus=%r is neither a number of contexts, nor a list of their numbers or names, nor None '
                           'for all; there are: %s' % (gpus, describe(there)))
    if not is_number:
        names = dict(enumerate(context.name for context in host_contexts()))
        return resolve_contexts(gpus and [gpu if isinstance(gpu, bool) else names.get(gpu, gpu) for gpu in gpus])
    if gpus < 1:
        raise ContextError('gpus=%d: a model needs at least one context; there are %d: %s'
                           % (gpus, len(there), describe(there)))
    n_processes = mpi_environment.size() if mpi_environment.trains_together() else 1
    # Others of this machine may have the other contexts or cards, or the user may want no more.
    if gpus > len(there) * n_processes and not (
            leases.is_child() or leases.named() or host_contexts() == configured() and gpus <= len(of_all_devices())):
        raise ContextError('To run with `gpus=%d`, as many contexts must be mapped; there are %d: %s. Reduce `gpus`, '
                           'or start the script by "theano-mgpu run --gpus %d", which reduces it; or map more: call '
                           "theano_mgpu.init('%s') before" % (gpus, len(there), describe(there), len(there),
                                                              brief(longer_map(there, min(gpus, MOST_DEVICES)))))
    return there[:gpus]
