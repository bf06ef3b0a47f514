"""An audit of where each op of a compiled function runs: on its context, on the host, or on a wrong context."""
from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import theano
from theano.gpuarray.basic_ops import GpuFromHost, HostFromGpu
from theano.gpuarray.type import GpuArrayType
from theano.scan_module.scan_op import Scan

from ..errors import GraphError, named
from ..utils.tables import Printed, table

ON_CONTEXT, ON_HOST, ON_WRONG_CONTEXT = 'context', 'host', 'wrong context'
OF_THEANO = 'theano.', 'theano_mgpu.'  # modules of ops that are not the user's


class OpPlacement(NamedTuple):
    """One Theano `op`, `where` it runs (see `audit`), and the name of its `context`."""

    op: theano.Op
    where: str
    context: str


class Audit(Printed, list):
    """A list of OpPlacement (`op`, `where`, `context`); printed, a table with counts."""

    @property
    def host(self) -> list[OpPlacement]:
        """Ops that run on the host, though the context is a GPU."""
        return [entry for entry in self if entry.where == ON_HOST]

    @property
    def wrong(self) -> list[OpPlacement]:
        """Ops that run on another context than the one of their function."""
        return [entry for entry in self if entry.where == ON_WRONG_CONTEXT]

    def __str__(self) -> str:
        counts = Counter((entry.context, entry.where, str(entry.op)) for entry in self)
        rows = [[context, where, str(count), op] for (context, where, op), count in sorted(counts.items())]
        return table([['context', 'runs on', 'count', 'op'], *rows], right={2})


def audit(function: Callable[..., Any]) -> Audit:
    """List each op of a compiled function, and where it runs.

    Parameters
    ----------
    function : callable
        A function of `mgpu.function` or `mgpu.training_function`; or the train, test or predict function of a
        Keras model over contexts: ``model.train_function``.

    Returns
    -------
    Audit
        `where` is ``'context'``, ``'host'`` or ``'wrong context'``. On a ``cpu`` context the host
        is the context. The ops inside a scan are listed too.

    Raises
    ------
    GraphError
        For anything else.
    """
    function = getattr(function, 'function', function)
    compiled = getattr(function, 'functions', [function])
    if not all(hasattr(f, 'mgpu_context') for f in compiled):
        raise GraphError('%s was not compiled for a context; audit takes what mgpu.function or '
                         'mgpu.training_function returned' % named(function))
    return Audit(entry for f in compiled for entry in _placements(f.maker.fgraph.toposort(), f.mgpu_context))


def host_obstacle(function: Callable[..., Any]) -> str:
    """Return why a compiled function computes on the host rather than on its context; '' if it does not."""
    placements = [entry for entry in audit(function) if not isinstance(entry.op, (GpuFromHost, HostFromGpu))]
    if all(entry.where != ON_CONTEXT for entry in placements):
        return 'it has no op for a device'
    own = [entry.op for entry in placements
           if entry.where == ON_HOST and not type(entry.op).__module__.startswith(OF_THEANO)]
    if own:
        return '%s has no version for a device' % named(own[0])
    loops = [node.op for f in function.functions for node in f.maker.fgraph.toposort()  # type: ignore[attr-defined]
             if isinstance(node.op, Scan) and _where(node, f.mgpu_context) == ON_HOST]
    return 'a loop, %s, computes on the host' % named(loops[0]) if loops else ''


def _placements(nodes: Iterable[theano.Apply], context: Any) -> Iterator[OpPlacement]:
    for node in nodes:
        yield OpPlacement(node.op, _where(node, context), context.name)
        if isinstance(node.op, Scan):
            yield from _placements(node.op.fn.maker.fgraph.toposort(), context)


def _where(node, context):
    names = {variable.type.context_name for variable in node.inputs + node.outputs
             if isinstance(variable.type, GpuArrayType)}
    if names - {context.name}:
        return ON_WRONG_CONTEXT
    return ON_CONTEXT if names or context.kind == 'cpu' else ON_HOST
