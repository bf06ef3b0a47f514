"""The graph of a training step: the loss, its gradients, and the new values."""
import inspect

import theano

from ..errors import GraphError
from . import graph
from .updates import as_dict, of_type


def loss_gradients(loss, params):
    """Return the gradients of a scalar loss, as host variables of the same graph; errors name the remedy."""
    if getattr(loss, 'ndim', None) != 0:
        raise GraphError('the loss must be a scalar, not %s of type %s: take its mean over the samples, '
                         'loss.mean()' % (loss, getattr(loss, 'type', type(loss).__name__)))
    known = graph.shared_variables([loss])
    for param in params:
        if param not in known:
            raise GraphError('the loss does not depend on the parameter %s; its shared variables are: %s'
                             % (param, ', '.join(map(str, known)) or 'none'))
    return [graph.from_gpu(gradient) for gradient in theano.grad(graph.on_host(loss), params)]


def new_values(updates, gradients, params):
    """Call the user's `updates`; return what it returns as a dict of SharedVariable to theano.Variable.

    Raises
    ------
    GraphError
        If what it returns are no updates of shared variables.
    """
    return as_dict(updates(*[gradients, params][:_takes(updates)]))


def on_host(updates):
    """Return updates as new values, on the host, of the `host_view` of each shared variable, and of its type.

    Parameters
    ----------
    updates : dict of SharedVariable to theano.Variable

    Returns
    -------
    dict of SharedVariable to theano.Variable
    """
    found = {graph.host_view(variable): of_type(variable, value) for variable, value in updates.items()}
    return dict(zip(found, graph.host_graph(list(found.values()))))


def read_by_updates(updates, loss):
    """List the shared variables that new values are made of beside the loss, such as states and learning rates.

    The loss may read much more: whole data sets, weights that are not trained.
    """
    of_loss = set(graph.shared_variables([loss]))
    return [variable for variable in graph.shared_variables(list(updates.values())) if variable not in of_loss]


def _takes(updates):
    """How many of (gradients, params) an updates callable wants: 1 or 2."""
    parameters = inspect.signature(updates).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    required += [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or not positional:
        raise GraphError('updates must be callable with (gradients) or (gradients, params), but %s needs %s: bind '
                         'the others, e.g. functools.partial(%s, %s=...)'
                         % (updates, required, getattr(updates, '__name__', 'updates'), (required or ['x'])[-1]))
    return max(1, len(required))
