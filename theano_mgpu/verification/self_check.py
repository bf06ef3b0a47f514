"""A function over contexts checks itself: a batch by plain Theano, from the same state."""
from ..errors import GraphError, MgpuError
from .comparison import Verification


def certificate(function, args, kwargs, tolerance=None):
    """Compare a call of a function with plain Theano; no shared variable changes.

    Parameters
    ----------
    function : DataParallel
    args, kwargs
        Of the call.
    tolerance : float, optional

    Returns
    -------
    Certificate
    """
    if function.sharded:
        raise MgpuError('verify compares with one device, which has the whole batch: here each process has samples of '
                        'its own. Verify in one process, without mpirun')
    with function.lock:
        verification = Verification(function.arguments.inputs, *function.built.definition, function.options.mode)
        return verification.certificate(function.arguments.bind(args, kwargs),
                                        lambda: _without_trace(function, args, kwargs), function.contexts, tolerance)


def _without_trace(function, args, kwargs):
    """The outputs of a step, and the new values, which are undone."""
    before = [each.value() for each in function.updated]
    try:
        return function.locked_step((args, kwargs)) + [each.value() for each in function.updated]
    finally:
        for each, value in zip(function.updated, before):
            each.variable.set_value(value)


def check(function, args, kwargs):
    """Raise a GraphError if a call does not give the answer of one device."""
    found = certificate(function, args, kwargs)
    if not found.passed:
        raise GraphError('%s does not give the answer of one device, nothing was changed: %s'
                         % (function.options.name or 'a function', found))
