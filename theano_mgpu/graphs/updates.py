"""New values of shared variables, as a caller gives them, and as shared variables have them by default."""
import theano
from theano.gpuarray.type import GpuArrayType

from ..errors import GraphError
from ..patches.placement_tags import placed_on
from . import graph


def pairs(mapping):
    """The pairs of a dict, or of a list of pairs, or of None."""
    return list(mapping.items() if hasattr(mapping, 'items') else mapping or ())


def as_dict(updates):
    """Updates as a dict; a GraphError where they are none of shared variables, or two of one."""
    found = pairs(updates)
    for variable, _ in found:
        if not isinstance(variable, theano.compile.SharedVariable):
            raise GraphError('updates have a new value for %r, which is no shared variable' % (variable,))
    if len(dict(found)) < len(found):
        raise GraphError('updates have two new values for one shared variable')
    return dict(found)


@placed_on(None)  # what is made here is not the user's, whatever block of mgpu.device this is called in
def with_givens(outputs, updates, givens, no_default_updates=False):
    """Outputs and updates with the givens substituted; the default updates that they bring along are among the updates.

    Parameters
    ----------
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
    givens : dict, or list of pairs, of theano.Variable to theano.Variable, or None
    no_default_updates : bool or list of SharedVariable
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
    variables = [graph.host_view(variable) for variable in updates]
    whole = list(outputs) + [of_type(variable, new) for variable, new in updates.items()]
    replacements = {old: old.type.filter_variable(graph.on_host(theano.tensor.as_tensor_variable(new)))
                    for old, new in pairs(givens)}
    without = no_default_updates if isinstance(no_default_updates, (list, tuple)) else ()
    default = [] if no_default_updates is True else [
        variable for variable in graph.shared_variables(graph.host_graph(_substituted(whole, replacements)))
        if getattr(variable, 'default_update', None) is not None and variable not in variables and
        getattr(variable.tag, 'stands_for', variable) not in without]
    whole += [of_type(variable, variable.default_update) for variable in default]
    # All at once: a draw is one node, of which an output has the numbers and a default update the new state.
    whole = graph.host_graph(_substituted(whole, replacements))
    return whole[:len(outputs)], dict(zip(variables + default, whole[len(outputs):]))


def _substituted(variables, replacements):
    return graph.substitute(variables, replacements) if replacements else variables


def of_type(variable, value):
    """A new value as a variable of the shared variable's type, as `theano.function` would have it."""
    if not isinstance(variable.type, (theano.tensor.TensorType, GpuArrayType)):
        return value
    value = graph.on_host(theano.tensor.as_tensor_variable(value))
    try:
        return graph.host_type(variable).filter_variable(value)
    except TypeError as error:
        raise GraphError('the new value of %s has type %s, not %s: cast it, or write its constants as numpy.%s'
                         % (variable, value.type, variable.type, variable.type.dtype)) from error
