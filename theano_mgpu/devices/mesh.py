"""The contexts of a function as a mesh: a row for each replica, and a column for each place of a placed graph."""
from __future__ import annotations

from typing import Any, List, Mapping, NamedTuple, Sequence, Tuple

from ..errors import ContextError
from ..utils import rank_process
from .context_map import HOST, Context, describe

UNPLACED = ''   # the place of a graph that is not placed
CPU = 'cpu'     # the place of values that are computed on the host


class Mesh(NamedTuple):
    """The contexts that a function runs on."""

    places: List[str]                    # the columns: names of contexts by which the graph is placed, or `UNPLACED`
    replicas: List[Tuple[Context, ...]]  # for each replica, the context of each place
    placement: Mapping[Any, str] = {}    # of each shared variable; empty for a graph that is not placed

    @property
    def contexts(self) -> list[Context]:
        """All contexts, each once."""
        return list(dict.fromkeys(context for replica in self.replicas for context in replica))

    @property
    def on_devices(self) -> bool:
        """Return whether any context is on a device other than the CPU."""
        return any(context.kind != 'cpu' for context in self.contexts)

    def column(self, place: str) -> list[Context]:
        """Return the context of a place on each replica."""
        index = self.places.index(place)
        return [replica[index] for replica in self.replicas]

    def first(self) -> Mesh:
        """Return the mesh of the first replica alone."""
        return self._replace(replicas=self.replicas[:1])


def mesh_of(contexts: Sequence[Any], places: Sequence[str] = (), own: Sequence[Context] | None = None) -> Mesh:
    """Lay out contexts, or a list of contexts for each replica, for a graph that is placed on `places`, if any.

    The named contexts make the first replica. The others make further ones, in their order. In a process that has other
    contexts of its `own` than the named ones, these take their place. Raise a ContextError if there are too few
    contexts for one replica, or a replica lacks one.

    >>> from theano_mgpu.devices.context_map import parse_context_map
    >>> four = parse_context_map('a->cuda0;b->cuda1;c->cuda2;d->cuda3')
    >>> [describe(replica) for replica in mesh_of(four, ['a', 'b']).replicas]
    ['a->cuda0;b->cuda1', 'c->cuda2;d->cuda3']
    >>> len(mesh_of(four).replicas)
    4
    """
    rows = rows_of(contexts)
    on_devices = [place for place in places if place != CPU]
    if rows:
        names, rows = _rows(rows, on_devices, own)
    elif on_devices:
        names, rows = on_devices, _grouped(list(contexts), on_devices, own or ())
    elif places:
        return Mesh([CPU], [(HOST,)])
    else:
        return Mesh([UNPLACED], [(context,) for context in contexts])
    here = [HOST] if CPU in places else []
    return Mesh(names + [CPU] * len(here), [tuple(row + here) for row in rows])


def rows_of(contexts: Sequence[Any]) -> list[list[Any]]:
    """Return the lists among contexts, or their names: one for each replica."""
    return [list(row) for row in contexts if isinstance(row, (list, tuple)) and not isinstance(row, Context)]


def _rows(rows, places, own):
    names = [context.name for context in rows[0]]
    text = '[%s]' % ', '.join('[%s]' % ', '.join(context.name for context in row) for row in rows)
    if not places:
        raise ContextError('contexts=%s has a list for each replica, but nothing in the graph is placed on a context. '
                           'Place it by "with mgpu.device(%r):", or give one list of contexts' % (text, names[-1]))
    if {len(row) for row in rows} != {len(names)}:
        raise ContextError('contexts=%s: each replica needs as many contexts as the first one' % text)
    missing = [place for place in places if place not in names]
    if missing:
        raise ContextError('the graph is placed on %s, which is not among the contexts of the first replica, %s. Add '
                           'it there, or place the graph on these' % (', '.join(missing), ', '.join(names)))
    usable = [row for row in rows if own is None or set(row) <= set(own)]
    if not usable:
        raise ContextError('contexts=%s: no replica has only contexts of this process, which are %s. Give each process '
                           'the contexts of a whole replica (launch --gpus-per-process %d)'
                           % (text, describe(own), len(names)))
    return names, usable


def _grouped(contexts, places, own):
    n = len(places)
    if len(contexts) < n:
        raise ContextError('the graph is placed on %d contexts (%s), but is to run on %d: %s. Leave out contexts= or '
                           'gpus=, or name all of them; with several processes, give each one %d contexts '
                           '(launch --gpus-per-process %d)'
                           % (n, ', '.join(places), len(contexts), describe(contexts), n, n))
    missing = [context.name for context in own if context.name in places and context not in contexts]
    if missing:
        raise ContextError('the graph is placed on %s, which is not among the contexts that it is to run on: %s. Add '
                           'it there, or place the graph on these' % (', '.join(missing), describe(contexts)))
    named = [context for place in places for context in contexts if context.name == place]
    if len(named) < n:  # the places are named after the contexts of another process
        named = contexts[:n]
    others = [context for context in contexts if context not in named]
    if len(others) % n:
        rank_process.note('%s stays unused: the graph is placed on %d contexts, and there are %d'
                          % (describe(others[-(len(others) % n):]), n, len(contexts)))
    return [named] + [others[i:i + n] for i in range(0, len(others) - n + 1, n)]
