"""The graph of a training step: the loss, its gradients, and the new values."""
from __future__ import annotations

import inspect
from typing import Any, Callable, Sequence

import theano
from theano.compile import SharedVariable

from ..errors import GraphError, named
from . import graph
from .partition import Output
from .updates import as_dict, of_type


def loss_gradients(loss: theano.Variable, params: Sequence[SharedVariable]) -> list[theano.Variable]:
    """Return the gradients of a scalar loss, as host variables of the same graph; errors name the remedy."""
    if getattr(loss, 'ndim', None) != 0:
        raise GraphError('the loss must be a scalar, not %s of type %s: take its mean over the samples, '
                         'loss.mean()' % (named(loss), getattr(loss, 'type', type(loss).__name__)))
    known = graph.shared_variables([loss])
    for param in params:
        if param not in known:
            raise GraphError('the loss does not depend on the parameter %s; its shared variables are: %s'
                             % (named(param), named(known)))
    return [graph.from_gpu(gradient) for gradient in theano.grad(graph.on_host(loss), params)]


def output_reductions(outputs: Sequence[Any]) -> tuple[list[theano.Variable], list[str | None]]:
    """Split ``outputs`` into variables and the reduction that the user names for each."""
    pairs = [output if isinstance(output, tuple) else (output, None) for output in outputs]
    return [variable for variable, _ in pairs], [how for _, how in pairs]


def check_reductions(results: Sequence[Output], reductions: Sequence[str | None],
                     outputs: Sequence[theano.Variable]) -> None:
    """Raise a GraphError where the reduction that the user names does not fit an output.

    Parameters
    ----------
    results : sequence of Output
        The plan's, one for each of `outputs`, and maybe more.
    """
    for how, result, output in zip(reductions, results, outputs):
        if how not in (None, 'gather', 'mean', 'sum'):
            raise GraphError('output %s is reduced by %r, which is none of gather, mean, sum' % (named(output), how))
        if how == 'gather' and result.reduction is None or how in ('mean', 'sum') and result.has_rows:
            raise GraphError('output %s %s, and cannot be reduced by %r. Leave the reduction out: outputs are those of '
                             'the whole batch' % (named(output), 'has rows of single samples' if result.reduction else
                                                  'has no rows of single samples', how))


def new_values(updates: Callable[..., Any], gradients: Sequence[theano.Variable],
               params: Sequence[SharedVariable]) -> dict[SharedVariable, theano.Variable]:
    """Call the user's `updates`; return its result as a dict of SharedVariable to theano.Variable.

    Raises
    ------
    GraphError
        If its result has no updates of shared variables.
    """
    return as_dict(updates(*[gradients, params][:_takes(updates)]))


def on_host(updates: dict[SharedVariable, theano.Variable]) -> dict[SharedVariable, theano.Variable]:
    """Return updates as new values, on the host, of the `host_view` of each shared variable, and of its type."""
    new = {graph.host_view(variable): of_type(variable, value) for variable, value in updates.items()}
    return dict(zip(new, graph.host_graph(list(new.values()))))


def read_by_updates(updates: dict[SharedVariable, theano.Variable], loss: theano.Variable) -> list[SharedVariable]:
    """List the shared variables that new values are made of beside the loss, such as states and learning rates.

    The loss may read much more: whole data sets, weights that are not trained.
    """
    of_loss = set(map(graph.host_view, graph.shared_variables([loss])))
    return [variable for variable in graph.shared_variables(list(updates.values())) if variable not in of_loss]


def _takes(updates):
    """Return how many of (gradients, params) an updates callable wants: 1 or 2."""
    parameters = inspect.signature(updates).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    required += [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or not positional:
        raise GraphError('updates must be callable with (gradients) or (gradients, params), but %s needs %s: bind '
                         'the others, e.g. functools.partial(%s, %s=...)'
                         % (updates, required, getattr(updates, '__name__', 'updates'), (required or ['x'])[-1]))
    return max(1, len(required))
