"""New values of shared variables, as a caller gives them, and as shared variables have them by default."""
from __future__ import annotations

from typing import Any, Sequence

import theano
from theano.compile import SharedVariable
from theano.gpuarray.type import GpuArrayType

from ..errors import GraphError, named
from . import graph
from .placement.tags import placed_on
from .rewrites import substitute


def pairs(mapping: Any) -> list[Any]:
    """Return the pairs of a dict, or of a list of pairs, or of None."""
    return list(mapping.items() if hasattr(mapping, 'items') else mapping or ())


def first_of_each(updates: Any) -> dict[Any, theano.Variable]:
    """Return updates as a dict, with the first new value of each variable, as Keras takes it."""
    first: dict[Any, theano.Variable] = {}
    for variable, new in pairs(updates):
        first.setdefault(variable, new)
    return first


def as_dict(updates: Any) -> dict[SharedVariable, theano.Variable]:
    """Return updates as a dict; raise a GraphError where they are none of shared variables, or two of one."""
    items = pairs(updates)
    for variable, _ in items:
        if not isinstance(variable, SharedVariable):
            raise GraphError('updates have a new value for %s, which is no shared variable' % named(variable))
    if len(dict(items)) < len(items):
        raise GraphError('updates have two new values for one shared variable')
    return dict(items)


@placed_on(None)  # ops made here have no place, even within a block of mgpu.device
def with_givens(outputs: Sequence[theano.Variable], updates: dict[SharedVariable, theano.Variable], givens: Any,
                no_default_updates: bool | Sequence[SharedVariable] = False,
                ) -> tuple[list[theano.Variable], dict[SharedVariable, theano.Variable]]:
    """Substitute the givens in outputs and updates, and add the default updates of shared variables to the updates.

    `no_default_updates` is as for `theano.function`. Return host variables; raise a GraphError if a new value is not of
    its variable's type.
    """
    variables = [graph.host_view(variable) for variable in updates]
    whole = list(outputs) + [of_type(variable, new) for variable, new in updates.items()]
    replacements = {old: old.type.filter_variable(graph.on_host(theano.tensor.as_tensor_variable(new)))
                    for old, new in pairs(givens)}

    def substituted(variables):
        return graph.host_graph(substitute(variables, replacements) if replacements else variables)
    without = no_default_updates if isinstance(no_default_updates, (list, tuple)) else ()
    default = [] if no_default_updates is True else [
        variable for variable in graph.shared_variables(substituted(whole))
        if getattr(variable, 'default_update', None) is not None and variable not in variables and
        getattr(variable.tag, 'stands_for', variable) not in without]
    whole += [of_type(variable, variable.default_update) for variable in default]
    # All at once: one node draws both the numbers, for an output, and the new state, for a default update.
    whole = substituted(whole)
    return whole[:len(outputs)], dict(zip(variables + default, whole[len(outputs):]))


def of_type(variable: SharedVariable, value: Any) -> Any:
    """Return a new value as a variable of the shared variable's type, as `theano.function` would have it."""
    if not isinstance(variable.type, (theano.tensor.TensorType, GpuArrayType)):
        return value
    value = graph.on_host(theano.tensor.as_tensor_variable(value))
    try:
        return graph.host_type(variable).filter_variable(value)
    except TypeError as error:
        raise GraphError('the new value of %s has type %s, not %s: cast it, or write its constants as numpy.%s'
                         % (named(variable), value.type, variable.type, variable.type.dtype)) from error
