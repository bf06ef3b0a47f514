"""A call of a `theano.function`, in which something else than Theano computes the graph."""
from theano.compile.function_module import Function
from theano.gof import vm

from ..parallel_function import check_subset

COMPUTE_SOME = vm.Stack, getattr(vm, 'CVM', vm.Stack)  # what runs a graph and can compute some of its outputs


class LeftToPlain(Exception):
    """A call that plain Theano has to make."""


class FunctionCall:
    """A call of a function, of which plain Theano computes nothing.

    `Function.__call__` runs with this in place of the function, and with `fn` in place of its compiled graph. So
    containers, defaults, names, and keywords such as ``output_subset``, are those of the function itself, and wrong
    arguments raise Theano's own errors.

    Parameters
    ----------
    function : theano.compile.function_module.Function
    compute : callable
        ``compute(values, subset)`` is given the values of the explicit inputs, and a list of the outputs that are asked
        for, or None for all. It returns these outputs, then the new values of inputs that have an update.

    Attributes
    ----------
    failure : Exception or None
        That of `compute`; a call without arguments at fault raises no other one.
    """

    need_update_inputs = False  # what Theano asks of `fn`

    def __init__(self, function, compute):
        self._function, self._compute, self.failure = function, compute, None
        self._inputs = explicit_inputs(function)
        self._before = [container.storage[0] for _, container in self._inputs]

    def run(self, args, kwargs):
        """Make the call; returns what plain Theano would return."""
        return Function.unwatched_call(self, *args, **kwargs)

    def undo(self):
        """Put back the values that the containers held before the call."""
        for (_, container), value in zip(self._inputs, self._before):
            container.storage[0] = value

    @property
    def fn(self):
        return self

    def __call__(self, output_subset=None):
        if output_subset is not None:
            check_subset(output_subset, self._function.n_returned_outputs)
        try:
            return self._outputs(output_subset)
        except Exception as error:
            self.failure = error
            raise

    def _outputs(self, subset):
        found = [None] * len(self._function.output_storage)
        if subset is not None:
            if not isinstance(self._function.fn, COMPUTE_SOME):
                raise LeftToPlain('output_subset=%r is an error' % (subset,))
            subset = list(dict.fromkeys(subset))
        values = [container.storage[0] for _, container in self._inputs]
        if any(value is None and hasattr(given.variable.type, 'ndim')
               for value, (given, _) in zip(values, self._inputs)):
            raise LeftToPlain('None was given for an array')
        results = self._compute(values, subset)
        for i in range(self._function.n_returned_outputs) if subset is None else subset:
            found[i] = results.pop(0)
        states = [container for given, container in self._inputs if given.update is not None]
        for container, value in zip(states, results):
            container.storage[0] = value
        return found

    def __setitem__(self, item, value):
        self._function[item] = value

    def __getattr__(self, name):
        if name == 'position_of_error':  # of a compiled graph that has failed; what has failed here says so itself
            raise AttributeError(name)
        return getattr(self._function, name)


def explicit_inputs(function):
    """Return the inputs of a function that are no shared variables, each an `In` and its container."""
    return [(given, container) for given, container in zip(function.maker.expanded_inputs, function.input_storage)
            if not given.shared]
