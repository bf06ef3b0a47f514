"""Placement by the user: `device`, a block, and `place`, for one expression."""
from __future__ import annotations

import functools
from typing import Any, ContextManager

import theano
from theano.gof.graph import ancestors

from .devices import contexts
from .devices.context_map import Context
from .devices.mesh import CPU
from .errors import GraphError, warn
from .graph import theano_functions
from .graph.patches import record_places
from .graph.placement.propagation import own_place
from .graph.placement.tags import placed_on, tag
from .graph.rewrites import inner_outputs


def device(name: str | Context | None) -> ContextManager[None]:
    """Return a block in which new ops and new shared variables are placed on a device.

    It works around Theano code, Lasagne layers and Keras layers: each new Apply node and each new shared variable is
    placed. Blocks nest; the innermost one counts. Gradients run on the device of the op that they are derived from,
    and updates where their parameter is, whatever block they are made in. Ops outside of any block run where their
    parameters or inputs are, see `propagation.assigned`.

    Placement only says where an op runs. It never changes results.

    Parameters
    ----------
    name : str, Context, or None
        A context; ``'cpu'``, the host, for a merge there, say; or None, a block without a placement inside of others.

    Returns
    -------
    context manager

    Raises
    ------
    ContextError
        If there is no such context.

    Examples
    --------
    >>> import theano.tensor as T
    >>> _ = contexts.init('dev0->cpu;dev1->cpu')
    >>> x = T.matrix()
    >>> with device('dev0'):
    ...     left = T.tanh(x)
    >>> with device('dev1'):
    ...     right = T.exp(x)
    ...     with device('cpu'):
    ...         both = left + right
    >>> left.tag.mgpu_place, right.tag.mgpu_place, both.tag.mgpu_place
    ('dev0', 'dev1', 'cpu')
    """
    _prepare()
    return placed_on(None if name is None else place_name(name))


def place(expression: theano.Variable, name: str | Context) -> theano.Variable:
    """Place one expression on a device: the op that computes it, or a shared variable, or an input.

    Place a model before its gradients are derived: these run where their forward ops are placed by then.

    Parameters
    ----------
    expression : theano.Variable
        With an op of several outputs, all of them are placed. A constant is on every device, and stays as it is.
    name : str or Context
        As for `device`; it replaces an earlier placement.

    Returns
    -------
    theano.Variable
        `expression` itself.

    Raises
    ------
    GraphError
        If `expression` is no Theano variable.
    ContextError
        If there is no such context.

    Examples
    --------
    >>> import theano.tensor as T
    >>> _ = contexts.init('dev0->cpu;dev1->cpu')
    >>> place(T.tanh(T.matrix()), 'dev1').tag.mgpu_place
    'dev1'
    """
    if not isinstance(expression, theano.Variable):
        raise GraphError('%r is no Theano variable: place takes an expression, a shared variable or an input. Use '
                         'mgpu.device(%r) around the code that makes several' % (expression, name))
    place = place_name(name)
    _prepare()
    if expression.owner is not None:
        tag(expression.owner, place)
        for inner in ancestors(inner_outputs(expression.owner.op)):  # made in the same block as a scan, say
            if isinstance(getattr(inner.tag, 'mgpu_place', None), str):
                inner.tag.mgpu_place = place
    elif not isinstance(expression, theano.Constant):
        expression.tag.mgpu_place = place
    return expression


@functools.lru_cache(None)
def _prepare():
    record_places()
    theano_functions.after_each_function(_warn_if_placed)


def _warn_if_placed(function, arguments):
    """Warn of a function of plain Theano that has placed ops; it may read variables that are placed."""
    if theano_functions.is_of_user(arguments) and any(
            variable.owner and isinstance(own_place(variable), str)
            for variable in ancestors(theano_functions.graph_of(function))):
        warn('%s is placed on devices, but plain Theano computes it on one. Make it with mgpu.function or '
             'mgpu.training_function, or call mgpu.enable() first; for a Keras model use multi_gpu_model'
             % function.mgpu_name)


def place_name(name: Any) -> str:
    """Return the place of a Context, or of its name; raise a ContextError if it is neither mapped nor the host."""
    name = getattr(name, 'name', name)
    return name if name == CPU else contexts.get(name).name
