"""Where each op of a compiled function runs: on its context, on the host, or on a wrong context."""
from collections import Counter, namedtuple

from theano.gpuarray.type import GpuArrayType
from theano.scan_module.scan_op import Scan

from ..errors import GraphError
from ..utils.tables import Printed

ON_CONTEXT, ON_HOST, ON_WRONG_CONTEXT = 'context', 'host', 'wrong context'

OpPlacement = namedtuple('OpPlacement', 'op where context')
OpPlacement.__doc__ = """One Theano `op`, `where` it runs (see `audit`), and the name of its `context`."""


class Audit(Printed, list):
    """List of OpPlacement (`op`, `where`, `context`); printed, a table with counts.

    Attributes
    ----------
    host, wrong : list of OpPlacement
        Those that run on the host though their function's context is a GPU, and those that run
        on another context than their function's.
    """

    @property
    def host(self):
        return [entry for entry in self if entry.where == ON_HOST]

    @property
    def wrong(self):
        return [entry for entry in self if entry.where == ON_WRONG_CONTEXT]

    def __str__(self):
        counts = Counter((entry.context, entry.where, str(entry.op)) for entry in self)
        rows = ['%-10s %-14s %5s  %s' % ('context', 'runs on', 'count', 'op')]
        rows += ['%-10s %-14s %5d  %s' % (context, where, count, op)
                 for (context, where, op), count in sorted(counts.items())]
        return '\n'.join(rows)


def audit(function):
    """List each op of a compiled function with where it runs.

    Parameters
    ----------
    function : callable
        What `mgpu.function` or `mgpu.training_function` returned; or the train, test or predict function of a
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
        raise GraphError('%r was not compiled for a context; audit takes what mgpu.function or '
                         'mgpu.training_function returned' % (function,))
    return Audit(entry for f in compiled
                 for entry in _placements(f.maker.fgraph.toposort(), f.mgpu_context))


def _placements(nodes, context):
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
