"""New values of shared variables, as a caller gives them, and as shared variables have them by default."""
import theano

from . import graph
from .errors import GraphError


def with_givens(outputs, updates, givens):
    """Outputs and updates with the givens substituted; the default updates that they bring along are among the updates.

    Parameters
    ----------
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
    givens : dict of theano.Variable to theano.Variable, or None
        As for `theano.function`.

    Returns
    -------
    list of theano.Variable, dict of SharedVariable to theano.Variable
        Of host variables.

    Raises
    ------
    GraphError
        If a new value is not of its variable's type.
    """
    n_outputs = len(outputs)
    variables = [graph.host_view(variable) for variable in updates]
    whole = list(outputs) + [of_type(variable, new) for variable, new in updates.items()]
    if givens:
        replacements = {old: old.type.filter_variable(graph.on_host(theano.tensor.as_tensor_variable(new)))
                        for old, new in givens.items()}
        whole = graph.substitute(whole, replacements)
    whole = graph.host_graph(whole)
    default = [variable for variable in graph.shared_variables(whole) if variable not in variables
               and getattr(variable, 'default_update', None) is not None]
    found = dict(zip(variables, whole[n_outputs:]))
    found.update(zip(default, graph.host_graph([of_type(v, v.default_update) for v in default])))
    return whole[:n_outputs], found


def of_type(variable, value):
    """A new value as a variable of the shared variable's type, as `theano.function` would have it."""
    if not hasattr(variable.type, 'broadcastable'):
        return value
    value = graph.on_host(theano.tensor.as_tensor_variable(value))
    try:
        return graph.host_type(variable).filter_variable(value)
    except TypeError as error:
        raise GraphError('the new value of %s has type %s, not %s: cast it, or write its constants as numpy.%s'
                         % (variable, value.type, variable.type, variable.type.dtype)) from error
